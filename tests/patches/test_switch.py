"""``enable()``, ``disable()``, ``status()``: what is on, what stands against it, and who is told."""

from __future__ import annotations

import logging
import sys

import pytest
import triton
from triton.runtime.autotuner import Autotuner

import smart_autotune
from smart_autotune import settings
from smart_autotune.patches import switch, triton_3_6_0
from smart_autotune.patches.gate import Conflict
from support.patching import on_the_verified_triton

STOCK_RUN = vars(Autotuner)["run"]


class OfAServer:
    """A server's own patch, as the switch sees it."""

    def __init__(self, name="server", fails=None):
        self.name, self.is_on, self.applied, self.fails = name, True, 0, fails
        self.patch = switch.ServerPatch(self.apply, self.revert, lambda: f"{name}: {'on' if self.is_on else 'off'}")

    def apply(self):
        self.is_on, self.applied = True, self.applied + 1
        switch.add(self.name, self.patch)

    def revert(self):
        if self.fails is not None:
            raise self.fails
        self.is_on = False


@pytest.fixture
def servers(monkeypatch):
    """Names of servers' patches; none to start with."""
    monkeypatch.setattr(switch, "_servers", {})
    monkeypatch.setattr(switch, "_put_back", set())
    return switch._servers


def said(caplog, level):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.fixture
def another_triton(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.9.0")


@pytest.fixture
def lenient():
    with settings.override(strict=False):
        yield


@on_the_verified_triton
def test_enable_and_disable_say_what_is_replaced_and_what_is_not():
    on = smart_autotune.enable()
    assert on.enabled and on.replaced == ("triton.runtime.autotuner.Autotuner.run",) and on.conflicts == ()
    assert (on.patch, on.requirement) == ("triton-3.6.0", "triton==3.6.0")
    off = smart_autotune.disable()
    assert not off.enabled and off.replaced == () and off.conflicts == ()
    assert vars(Autotuner)["run"] is STOCK_RUN


@on_the_verified_triton
def test_both_are_idempotent_and_enabling_is_said_once(caplog):
    caplog.set_level(logging.INFO)
    assert smart_autotune.enable() == smart_autotune.enable()
    assert said(caplog, logging.INFO) == ["triton-3.6.0 applied: triton.autotune kernels are tuned by smart_autotune"]
    assert smart_autotune.disable() == smart_autotune.disable()


def test_status_is_off_before_and_does_not_scan_for_tuners(monkeypatch):
    monkeypatch.setattr(triton_3_6_0, "instances", lambda: 1 / 0)
    status = smart_autotune.status()
    assert not status.enabled and (status.tuners_before, status.tuners_after) == (0, 0)
    assert str(status) == "smart_autotune: off (patch triton-3.6.0, needs triton==3.6.0)"


def test_status_renders_all_of_it_as_lines():
    status = switch.Status(
        True, "some-patch", "triton==1.2", ("a.B.run",), (Conflict("some-patch", "this", "that", "nothing"),), 3, 4,
        ("theirs.Tuner (left alone)",),
    )  # fmt: skip
    assert str(status).splitlines() == [
        "smart_autotune: on (patch some-patch, needs triton==1.2)",
        "  replaced: a.B.run",
        "  conflict: some-patch: expected this, found that; nothing",
        "  tuners made before it: 3, after it: 4",
        "  subclass with its own run: theirs.Tuner (left alone)",
    ]


def test_a_conflict_leaves_stock_and_is_warned_about_once(another_triton, lenient, caplog):
    for _ in range(3):
        status = smart_autotune.enable()
        assert not status.enabled and vars(Autotuner)["run"] is STOCK_RUN
    text = "triton-3.6.0: expected triton==3.6.0, found triton 3.9.0; stock behaviour is left as it is"
    assert said(caplog, logging.WARNING) == [text]
    assert [str(conflict) for conflict in status.conflicts] == [text]
    assert f"  conflict: {text}" in str(smart_autotune.status()).splitlines()


def test_a_conflict_raises_when_strict_each_time(another_triton):
    for _ in range(2):
        with pytest.raises(switch.PatchRefused, match=r"expected triton==3\.6\.0, found triton 3\.9\.0"):
            smart_autotune.enable()
    assert vars(Autotuner)["run"] is STOCK_RUN


@on_the_verified_triton
def test_a_conflict_is_forgotten_once_enabling_works(monkeypatch, lenient):
    with monkeypatch.context() as scope:
        scope.setattr(triton, "__version__", "3.9.0")
        assert len(smart_autotune.enable().conflicts) == 1
    assert smart_autotune.enable().conflicts == ()


def test_two_different_conflicts_are_both_told(monkeypatch, lenient, caplog):
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    smart_autotune.enable()
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    assert len(smart_autotune.enable().conflicts) == 2
    assert len(said(caplog, logging.WARNING)) == 2


def test_without_triton_enable_is_a_conflict_and_disable_does_nothing(monkeypatch, lenient):
    for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises ImportError
    (conflict,) = smart_autotune.enable().conflicts
    assert conflict.expected == "triton==3.6.0" and "cannot be imported" in conflict.found


def test_a_bad_setting_is_an_error_of_enable_and_nothing_is_patched(monkeypatch):
    monkeypatch.setattr(settings, "_current", None)
    monkeypatch.setenv("SMART_AUTOTUNE_MODE", "tnue")
    with pytest.raises(settings.SettingsError, match="SMART_AUTOTUNE_MODE='tnue'"):
        smart_autotune.enable()
    assert vars(Autotuner)["run"] is STOCK_RUN


@on_the_verified_triton
def test_a_disable_that_has_to_step_aside_warns_and_status_is_off(lenient, caplog):
    smart_autotune.enable()
    Autotuner.run = lambda self, *args, **kwargs: None
    status = smart_autotune.disable()
    assert not status.enabled
    (line,) = said(caplog, logging.WARNING)
    assert f"found one put there by {__name__}; ours passes its calls to stock" in line
    assert [str(conflict) for conflict in status.conflicts] == [line]


# ---- servers' own patches --------------------------------------------------------------------------------------------


def test_without_a_server_status_has_none_and_loads_nothing_of_one(servers, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("smart_autotune.patches.sglang")]:
        monkeypatch.delitem(sys.modules, name)
    assert smart_autotune.status().servers == smart_autotune.disable().servers == ()
    assert not any(name.partition(".")[0] == "sglang" or name.endswith("patches.sglang") for name in sys.modules)


@on_the_verified_triton
def test_status_shows_a_servers_own_patch_and_disable_reverts_it_too(servers):
    one, other = OfAServer("one"), OfAServer("other")
    one.apply()
    other.apply()
    on = smart_autotune.enable()
    assert on.servers == ("one: on", "other: on") and str(on).splitlines()[-2:] == ["one: on", "other: on"]
    assert (one.applied, other.applied) == (1, 1), "what is in force is not applied again"
    off = smart_autotune.disable()
    assert off.servers == ("one: off", "other: off") and not off.enabled
    assert smart_autotune.disable() == off


@on_the_verified_triton
def test_enable_applies_again_what_disable_has_reverted_and_nothing_else(servers):
    ours, reverted_by_hand = OfAServer("ours"), OfAServer("by hand")
    ours.apply()
    smart_autotune.disable()
    reverted_by_hand.apply()
    reverted_by_hand.revert()
    assert smart_autotune.enable().servers == ("ours: on", "by hand: off")
    assert smart_autotune.enable().servers == ("ours: on", "by hand: off") and ours.applied == 2


@on_the_verified_triton
def test_a_servers_patch_that_cannot_be_reverted_is_an_error_and_all_else_is_put_back(servers):
    stubborn, other = OfAServer("stubborn", fails=RuntimeError("cannot")), OfAServer("other")
    stubborn.apply()
    other.apply()
    smart_autotune.enable()
    with pytest.raises(RuntimeError, match="cannot"):
        smart_autotune.disable()
    assert vars(Autotuner)["run"] is STOCK_RUN and not other.is_on


def test_without_triton_a_servers_own_patch_is_reverted_all_the_same(servers, monkeypatch):
    server = OfAServer()
    server.apply()
    for name in [name for name in sys.modules if name == "triton" or name.startswith("triton.")]:
        monkeypatch.delitem(sys.modules, name)
    assert smart_autotune.disable().servers == ("server: off",)
    assert "triton" not in sys.modules
