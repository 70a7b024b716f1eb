"""Every setting: default, good values, bad values; and none that is wired to nothing."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from smart_autotune import patches, settings
from smart_autotune.settings import Settings, SettingsError

FIELDS = dataclasses.fields(Settings)


class Cases(NamedTuple):
    """What one setting is tested with: its default, texts and what they mean, and texts that are refused."""

    default: Any
    good: dict[str, Any]
    bad: list[str]
    allowed: str  # words that the refusal must hold


YES_NO = {"1": True, "true": True, "On": True, " yes ": True, "0": False, "False": False, "off": False, "": False}
COUNT = {"1": 1, " 7 ": 7, "4096": 4096}
SECONDS = {"1": 1.0, "0.25": 0.25, " 2.5 ": 2.5, "1e3": 1000.0}
NOT_YES_NO = ["2", "maybe", "-1", "tru"]
NOT_A_COUNT = ["-1", "1.5", "many", "", "0x10", "inf"]
NOT_SECONDS = ["0", "-1", "soon", "", "nan", "inf", "-inf", "1s"]

# One entry for each field of Settings. A new setting needs one here.
CASES = {
    "mode": Cases(
        "tune",
        {"tune": "tune", "first_fit": "first_fit", "PINNED": "pinned", " off ": "off", "Stock": "stock"},
        ["", "tnue", "first-fit", "1", "on"],
        "tune | first_fit | pinned | off | stock",
    ),
    "batch": Cases("auto", {"auto": "auto", "OFF": "off"}, ["", "on", "1", "q"], "auto | off"),
    "max_buckets": Cases(12, COUNT, ["0", *NOT_A_COUNT], "an integer >= 1"),
    "cache": Cases(True, YES_NO, NOT_YES_NO, "1 or 0"),
    "cache_dir": Cases("", {"": "", " /a/b c ": "/a/b c", "~/x": "~/x"}, [], ""),
    "share": Cases(
        "host", {"off": "off", "HOST": "host", " ranks": "ranks"}, ["", "on", "1", "rank"], "off | host | ranks"
    ),
    "wait_secs": Cases(300.0, SECONDS, NOT_SECONDS, "seconds > 0"),
    "compile_workers": Cases(0, {"0": 0, **COUNT}, NOT_A_COUNT, "an integer >= 0"),
    "compile_timeout_secs": Cases(180.0, SECONDS, NOT_SECONDS, "seconds > 0"),
    "budget_secs": Cases(0.0, {"0": 0.0, **SECONDS}, [text for text in NOT_SECONDS if text != "0"], "seconds >= 0"),
    "bench": Cases("events", {"events": "events", "GRAPH": "graph"}, ["", "event", "1", "off"], "events | graph"),
    "rescue": Cases(True, YES_NO, NOT_YES_NO, "1 or 0"),
    "deterministic": Cases(False, YES_NO, NOT_YES_NO, "1 or 0"),
    "log": Cases("", {"": "", " /a/b %p.jsonl ": "/a/b %p.jsonl", "~/x/": "~/x/"}, [], ""),
    "sparse_decode": Cases(
        "0", {"0": "0", "": "0", "off": "0", "1": "1", " On ": "1", "FORCE": "force"}, NOT_YES_NO, "1 or 0 or force"
    ),
    "freeze_after_capture": Cases(False, YES_NO, NOT_YES_NO, "1 or 0"),
    "shared_bytes_cap": Cases(0, {"0": 0, "101376": 101_376}, NOT_A_COUNT, "an integer >= 0"),
    "strict": Cases(False, YES_NO, NOT_YES_NO, "1 or 0"),
}
GOOD = [(name, text, value) for name, cases in CASES.items() for text, value in cases.good.items()]
BAD = [(name, text) for name, cases in CASES.items() for text in cases.bad]


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has not read its settings yet, and has none."""
    monkeypatch.setattr(settings, "_current", None)
    for setting in FIELDS:
        monkeypatch.delenv(variable(setting.name), raising=False)
    return monkeypatch


def variable(name: str) -> str:
    return f"SMART_AUTOTUNE_{name.upper()}"


def test_every_setting_has_cases_here_and_every_case_a_setting() -> None:
    assert set(CASES) == {setting.name for setting in FIELDS}


@pytest.mark.parametrize("name", [setting.name for setting in FIELDS])
def test_every_setting_has_its_default_when_nothing_is_set(unread: pytest.MonkeyPatch, name: str) -> None:
    value = getattr(settings.current(), name)
    assert value == CASES[name].default
    assert type(value) is type(CASES[name].default)


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_every_setting_takes_its_good_values(unread: pytest.MonkeyPatch, name: str, text: str, value: Any) -> None:
    unread.setenv(variable(name), text)
    found = getattr(settings.current(), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_a_setting_changes_no_other(unread: pytest.MonkeyPatch, name: str, text: str, value: Any) -> None:
    unread.setenv(variable(name), text)
    assert dataclasses.replace(settings.current(), **{name: CASES[name].default}) == Settings()


@pytest.mark.parametrize(("name", "text"), BAD)
def test_a_bad_value_is_refused_with_variable_value_and_what_is_allowed(
    unread: pytest.MonkeyPatch, name: str, text: str
) -> None:
    unread.setenv(variable(name), text)
    with pytest.raises(SettingsError) as caught:
        settings.current()
    for word in (variable(name), repr(text), CASES[name].allowed):
        assert word in str(caught.value)


@pytest.mark.parametrize("setting", FIELDS, ids=lambda setting: setting.name)
def test_every_setting_says_what_it_means_in_one_line(setting: dataclasses.Field[Any]) -> None:
    meaning = setting.metadata["meaning"]
    assert 10 < len(meaning) < 120
    assert "\n" not in meaning


@pytest.mark.parametrize("setting", FIELDS, ids=lambda setting: setting.name)
def test_every_default_is_a_value_that_could_be_set(setting: dataclasses.Field[Any]) -> None:
    assert setting.metadata["parse"](str(setting.default)) == setting.default


# ---- read before anything else ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "value"), YES_NO.items())
def test_the_patch_is_asked_for_by_one_variable(unread: pytest.MonkeyPatch, text: str, value: bool) -> None:
    unread.setenv("SMART_AUTOTUNE", text)
    assert settings.requested() is value


def test_the_patch_is_not_asked_for_by_default(unread: pytest.MonkeyPatch) -> None:
    unread.delenv("SMART_AUTOTUNE", raising=False)
    assert settings.requested() is False


@pytest.mark.parametrize("text", NOT_YES_NO)
def test_a_bad_value_of_the_patchs_variable_is_refused_like_any_other(unread: pytest.MonkeyPatch, text: str) -> None:
    unread.setenv("SMART_AUTOTUNE", text)
    with pytest.raises(SettingsError) as caught:
        settings.requested()
    for word in ("SMART_AUTOTUNE=", repr(text), "1 or 0"):
        assert word in str(caught.value)


@pytest.mark.parametrize(("text", "value"), YES_NO.items())
def test_strictness_is_known_even_where_another_setting_is_bad(
    unread: pytest.MonkeyPatch, text: str, value: bool
) -> None:
    unread.setenv(variable("mode"), "tnue")
    unread.setenv(variable("strict"), text)
    assert settings.strict_requested() is value


# ---- wired to something --------------------------------------------------------------------------------------------


def is_current(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("settings.current", "current")


def settings_read_in(source: str) -> Iterator[str]:
    """Names read off ``settings.current()``, directly or through a local variable."""
    for scope in ast.walk(ast.parse(source)):
        if not isinstance(scope, (ast.FunctionDef, ast.Module)):
            continue
        held = {
            target.id
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and is_current(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(scope):
            if isinstance(node, ast.Attribute):
                owner = node.value
                if is_current(owner) or (isinstance(owner, ast.Name) and owner.id in held):
                    yield node.attr


@functools.cache
def settings_read_by_the_package() -> set[str]:
    declared_in = Path(inspect.getfile(settings))
    folders = (declared_in.parent, Path(inspect.getfile(patches)).parent)
    files = [path for folder in folders for path in folder.rglob("*.py") if path != declared_in]
    return {name for path in files for name in settings_read_in(path.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("name", [setting.name for setting in FIELDS])
def test_every_setting_is_read_somewhere(name: str) -> None:
    assert name in settings_read_by_the_package(), f"{variable(name)} is declared but wired to nothing"


def test_nothing_reads_a_setting_that_is_not_declared() -> None:
    assert settings_read_by_the_package() <= {setting.name for setting in FIELDS}


# ---- reading and overriding ----------------------------------------------------------------------------------------


def test_the_environment_is_read_once(unread: pytest.MonkeyPatch) -> None:
    unread.setenv(variable("max_buckets"), "3")
    assert settings.current().max_buckets == 3
    unread.setenv(variable("max_buckets"), "4")
    assert settings.current().max_buckets == 3


def test_a_bad_value_is_refused_at_each_reading_not_only_at_the_first(unread: pytest.MonkeyPatch) -> None:
    unread.setenv(variable("mode"), "tnue")
    for _ in range(2):
        with pytest.raises(SettingsError):
            settings.current()


def test_settings_cannot_be_changed_in_place() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.current().strict = True  # type: ignore[misc]


def test_override_changes_what_it_names_and_puts_the_rest_back() -> None:
    before = settings.current()
    with settings.override(max_buckets=3) as changed:
        assert settings.current() is changed
        assert changed == dataclasses.replace(before, max_buckets=3)
        with settings.override(rescue=False):
            assert (settings.current().max_buckets, settings.current().rescue) == (3, False)
        assert settings.current() is changed
    assert settings.current() is before


def test_override_puts_back_after_an_exception() -> None:
    before = settings.current()
    with pytest.raises(KeyError), settings.override(strict=True):
        raise KeyError
    assert settings.current() is before


def test_override_refuses_an_unknown_setting_and_names_the_known() -> None:
    before = settings.current()
    with pytest.raises(SettingsError) as caught, settings.override(max_bucket=3):
        pass
    for word in ("'max_bucket'", "max_buckets", "rescue"):
        assert word in str(caught.value)
    assert settings.current() is before
