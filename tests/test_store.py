"""Entries on disk: there after a restart, and whatever is wrong with file or disk costs a warning, never a launch."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smart_autotune import once
from smart_autotune import settings as our_settings
from smart_autotune import store as store_module
from smart_autotune.store import Store, call_file, current
from smart_autotune.verdict import Outcome
from support.stored import CONFIGS, LIMITS, key, record, winner_of


@pytest.fixture(autouse=True)
def nothing_said_yet() -> Iterator[None]:
    once.forget()
    yield
    once.forget()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "not" / "there" / "yet")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def load(store: Store, met: Any = None) -> Any:
    return store.load(met or key(), CONFIGS, LIMITS)


# ---- remembering ---------------------------------------------------------------------------------------------------


def test_what_was_saved_is_there_and_nothing_else_is(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    assert load(store) is None
    store.save(record(key()))
    found = load(store)
    assert found.complete and found.served_by == "tuned"
    assert found.verdicts == record(key()).verdicts and found.verdicts[0].config is CONFIGS[1]
    assert load(store, key(513)) is None
    assert warnings(caplog) == []


def test_one_readable_file_a_key_in_a_folder_of_its_triton(store: Store) -> None:
    for n in (1, 2, True, "1"):
        store.save(record(key(n, type(n).__name__)))
    files = [path for path in store.folder.rglob("*") if path.is_file()]
    assert len(files) == 4 and {path.parent.name for path in files} == {f"triton-{triton.__version__}"}
    assert all(path.name.startswith("decode-") and path.suffix == ".json" for path in files)
    entry = json.loads(files[0].read_text())
    assert entry["key"]["kernel"] == "package.module.decode" and entry["environment"]["triton"] == triton.__version__
    assert len(entry["verdicts"]) == 4


def test_a_sweep_is_written_as_it_goes_and_the_last_state_counts(store: Store) -> None:
    whole = record(key())
    for count in range(1, 5):
        store.save(type(whole)("decode", key(), whole.verdicts[:count], "tuned"), complete=count == 4)
        found = load(store)
        assert len(found.verdicts) == count and found.complete == (count == 4)


def test_a_key_that_cannot_be_written_is_not_kept_and_nothing_is_said(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    unwritable = key(object(), "object")
    assert store.path(unwritable) is None
    store.save(record(unwritable))
    assert load(store, unwritable) is None and not store.folder.exists()
    assert warnings(caplog) == []


def test_a_file_is_written_as_the_umask_says(store: Store) -> None:
    before = os.umask(0o027)
    try:
        store.save(record(key()))
    finally:
        os.umask(before)
    path = store.path(key())
    assert path is not None and path.stat().st_mode & 0o777 == 0o640


# ---- where ---------------------------------------------------------------------------------------------------------


def folder_of(found: Store | None) -> str | None:
    return None if found is None else str(found.folder)


def test_the_settings_say_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    with our_settings.override(cache=False, cache_dir=str(tmp_path)):
        assert current() is None
    with our_settings.override(cache=True, cache_dir=str(tmp_path)):
        assert folder_of(current()) == str(tmp_path)
    with our_settings.override(cache=True, cache_dir="~/tuned"):
        assert folder_of(current()) == "/home/me/tuned"
    with our_settings.override(cache=True, cache_dir=""):
        assert folder_of(current()) == "/home/me/.cache/smart_autotune"
        monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
        assert folder_of(current()) == "/caches/smart_autotune"
        for unset in ("", "relative"):
            monkeypatch.setenv("XDG_CACHE_HOME", unset)
            assert folder_of(current()) == "/home/me/.cache/smart_autotune"


def test_a_home_that_is_not_there_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with our_settings.override(cache=True, cache_dir="~nobody-of-this-name/x"):
        assert current() is None and current() is None
    assert len(warnings(caplog)) == 1


# ---- the call beside an entry --------------------------------------------------------------------------------------


def test_a_call_lies_beside_its_entry_and_changes_nothing_that_is_read(store: Store) -> None:
    assert store.save(record(key()))
    before = load(store)
    store.save_call(key(), '{"format": 1}')
    path = store.path(key())
    assert path is not None and call_file(path).read_text() == '{"format": 1}\n'
    assert {found.name for found in path.parent.iterdir()} == {path.name, path.stem + ".call"}
    assert load(store) == before


def test_a_later_call_replaces_the_former(store: Store) -> None:
    store.save(record(key()))
    for text in ("first, longer", "second"):
        store.save_call(key(), text)
    assert call_file(store.path(key())).read_text() == "second\n"  # type: ignore[arg-type]


def test_a_key_that_cannot_be_written_has_no_call(store: Store) -> None:
    unwritable = key(object(), "object")
    assert not store.save(record(unwritable))
    store.save_call(unwritable, "line")
    assert not store.folder.exists()


@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_disk_that_takes_the_entry_and_not_the_call_costs_one_warning(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    for n in (1, 2):
        assert store.save(record(key(n)))
        with monkeypatch.context() as scope:
            scope.setattr(store_module if call == "open" else os, call, fails, raising=False)
            store.save_call(key(n), "line")
    (warning,) = warnings(caplog)
    assert "No space left" in warning and ".call" in warning and "cannot be audited" in warning
    assert load(store, key(1)) is not None and not list(store.folder.rglob("*.call*"))


def test_what_a_killed_writer_of_a_call_left_is_removed_when_it_is_old(store: Store) -> None:
    path = store.path(key())
    assert path is not None
    path.parent.mkdir(parents=True)
    old = path.parent / f".{call_file(path).name}.1-0.tmp"
    old.touch()
    os.utime(old, (0, 0))
    store.save(record(key()))
    assert not old.exists()


def test_an_entry_that_is_not_written_is_said_to_its_caller(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("mine")
    assert not Store(tmp_path / "cache").save(record(key()))


# ---- entries that are damaged --------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    whole = path.read_bytes()
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "endless":
        path.symlink_to("/dev/zero")
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "huge":
        with path.open("wb") as file:
            file.truncate(store_module.MOST_BYTES + 1)
    else:
        path.write_bytes(
            {
                "empty": b"",
                "brace": b"{",
                "truncated": whole[:-10],
                "binary": bytes(range(256)),
                "utf-16": whole.decode().encode("utf-16")[:-1],
                "list": b"[]",
                "deep": b"[" * 100_000,
                "NaN": whole.replace(b'"median_us": 1.0', b'"median_us": NaN'),
                "Infinity": whole.replace(b'"median_us": 1.0', b'"median_us": 1e999'),
                "digits": whole.replace(b'"need": 65536', b'"need": ' + b"9" * 10_000),
                "foreign": whole.replace(b"decode", b"encode"),
                "over the cap": whole.replace(b'"need": 65536', b'"need": 300000'),
            }[how]
        )


DAMAGES = [
    "folder", "fifo", "endless", "loop", "huge", "empty", "brace", "truncated", "binary", "utf-16", "list", "deep",
    "NaN", "Infinity", "digits", "foreign", "over the cap",
]  # fmt: skip


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_entry_is_a_miss_with_one_warning_that_names_it(
    store: Store, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    store.save(record(key()))
    path = store.path(key())
    assert path is not None
    damage(path, how)
    assert load(store) is None and load(store) is None
    (warning,) = warnings(caplog)
    assert str(path) in warning and len(warning) < 600


@pytest.mark.parametrize("how", ["brace", "NaN", "foreign", "over the cap", "fifo", "loop"])
def test_the_next_tuning_mends_it(store: Store, how: str) -> None:
    store.save(record(key()))
    damage(store.path(key()), how)  # type: ignore[arg-type]
    store.save(record(key()))
    assert load(store).verdicts == record(key()).verdicts


def test_each_damaged_file_is_named(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    for n in range(3):
        store.save(record(key(n)))
        damage(store.path(key(n)), "brace")  # type: ignore[arg-type]
        assert load(store, key(n)) is None
    assert len(warnings(caplog)) == 3


def test_an_entry_copied_to_another_keys_name_is_a_miss_that_names_the_part(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(record(key(512)))
    shutil.copy(store.path(key(512)), store.path(key(513)))  # type: ignore[arg-type]
    assert load(store, key(513)) is None
    assert 'key.values.topk is ["int",512], today ["int",513]' in warnings(caplog)[0]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_flipped_bits_and_cut_ends_are_misses_or_change_nothing_that_is_served(
    tmp_path: Path, data: st.DataObject
) -> None:
    store = Store(tmp_path)
    store.save(dataclasses.replace(record(key()), created=1.0))
    path = store.path(key())
    assert path is not None
    damaged = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(damaged[: data.draw(st.one_of(st.none(), st.integers(0, len(damaged))))])
    found = load(store)
    for verdict in found.verdicts if found else ():
        assert any(verdict.config is config for config in CONFIGS)
        assert verdict.outcome in Outcome and (not verdict.fits or verdict.need <= LIMITS.shared_bytes)


# ---- disks that do not take it -------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EBUSY, errno.ESTALE, errno.EDQUOT, errno.EROFS, errno.EIO])
@pytest.mark.parametrize("call", ["open", "replace", "mkdir"])
def test_a_disk_error_costs_one_warning_and_leaves_what_was_there(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str, number: int
) -> None:
    store.save(record(key(), (1.0, 2.0, 3.0, 4.0)))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as scope:
        if call == "open":
            scope.setattr(store_module, "open", fails, raising=False)
        else:
            scope.setattr(os, call, fails)
        for n in (512, 1, 2):
            store.save(record(key(n)))
    if call != "mkdir":  # it is there already
        assert load(store, key(1)) is None
        assert winner_of(load(store)) == str(CONFIGS[0])
        assert len([text for text in warnings(caplog) if "not kept" in text]) == 1
    assert not list(store.folder.rglob(".*.tmp"))


def test_cleaning_up_that_fails_undoes_no_finished_write(
    store: Store, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = store.path(key())
    assert path is not None
    path.parent.mkdir(parents=True)
    (path.parent / ".old.json.1-0.tmp").touch()
    os.utime(path.parent / ".old.json.1-0.tmp", (0, 0))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(os, "unlink", fails)
    store.save(record(key()))
    assert load(store).verdicts == record(key()).verdicts and warnings(caplog) == []


def test_what_a_killed_writer_left_is_removed_when_it_is_old(store: Store) -> None:
    path = store.path(key())
    assert path is not None
    path.parent.mkdir(parents=True)
    old, young = path.parent / ".a.json.1-0.tmp", path.parent / ".b.json.2-0.tmp"
    for file, age in ((old, 2 * store_module._STALE_SECS), (young, 60)):
        file.touch()
        os.utime(file, (time.time() - age,) * 2)
    store.save(record(key()))
    assert not old.exists() and young.exists() and load(store) is not None


def test_a_file_where_the_folder_should_be_costs_one_warning_each_way(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("mine")
    store = Store(tmp_path / "cache")
    for n in range(3):
        store.save(record(key(n)))
        assert load(store, key(n)) is None
    assert len(warnings(caplog)) == 2


def in_child(work: Any) -> int:
    """Exit status of ``work`` in a forked child: 0 when it returned True."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.fixture
def shared_folder() -> Iterator[Path]:
    """One that any user can reach."""
    folder = Path(tempfile.mkdtemp(prefix="smart-autotune-test-", dir="/tmp"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_folder_of_another_user_serves_and_is_not_written(
    shared_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(shared_folder)
    store.save(record(key()))

    def work() -> bool:
        caplog.clear()
        os.setuid(65_534)
        served = load(store)
        for n in (512, 1, 2):
            store.save(record(key(n)))
        return served is not None and load(store, key(1)) is None and len(warnings(caplog)) == 1

    assert in_child(work) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_a_folder_closed_to_us_costs_one_warning_each_way(
    shared_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(shared_folder / "closed")
    store.save(record(key()))
    (shared_folder / "closed").chmod(0o700)

    def work() -> bool:
        caplog.clear()
        os.setuid(65_534)
        missed = [load(store, key(n)) is None for n in (512, 1, 2)]
        for n in (512, 1, 2):
            store.save(record(key(n)))
        return all(missed) and len(warnings(caplog)) == 2

    assert in_child(work) == 0


def test_a_disk_that_is_full_in_the_middle_of_a_file_keeps_the_former_one(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(record(key(), (1.0, 2.0, 3.0, 4.0)))

    def work() -> bool:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        for _ in range(3):
            store.save(record(key()))
        return len(warnings(caplog)) == 1 and not list(store.folder.rglob(".*.tmp"))

    assert in_child(work) == 0
    assert winner_of(load(store)) == str(CONFIGS[0])


# ---- many at once --------------------------------------------------------------------------------------------------


def test_threads_that_write_and_read_one_key_see_whole_entries(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    store.save(record(key()))
    seen: list[bool] = []

    def work(seed: int) -> None:
        for n in range(25):
            store.save(record(key(), tuple(float((n + seed + i) % 7) for i in range(4))))
            seen.append(len(load(store).verdicts) == 4)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 100 and warnings(caplog) == []
    assert not list(store.folder.rglob(".*.tmp"))
