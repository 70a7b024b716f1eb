"""One tuner for each key: who holds, who waits, and that nothing stays behind."""

from __future__ import annotations

import errno
import logging
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock
import pytest

from smart_autotune import once, settings
from smart_autotune.agreement import SingleFlight, one_process
from smart_autotune.settings import SettingsError

LONG_SECS = 20.0


@pytest.fixture
def flight() -> Iterator[SingleFlight]:
    """Whatever a test does with it, no lock may be left at its end."""
    flight = SingleFlight()
    yield flight
    assert not flight._locks


@contextmanager
def held_elsewhere(flight: SingleFlight, key: object = "key") -> Iterator[threading.Event]:
    """Another thread holds ``key`` until the event is set, or the scope ends."""
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with flight.claim(key, LONG_SECS) as held:
            assert held
            holding.set()
            release.wait(LONG_SECS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(LONG_SECS)
    try:
        yield release
    finally:
        release.set()
        thread.join(LONG_SECS)


def test_a_free_key_is_held_at_once(flight: SingleFlight) -> None:
    with flight.claim("key", LONG_SECS) as held:
        assert held


def test_a_free_key_is_held_without_waiting_too(flight: SingleFlight) -> None:
    with flight.claim("key", 0) as held:
        assert held


def test_of_many_threads_one_at_a_time_holds_a_key_and_each_gets_it(flight: SingleFlight) -> None:
    inside, most, turns = 0, 0, []
    start = threading.Barrier(8)

    def work(index: int) -> None:
        nonlocal inside, most
        start.wait(LONG_SECS)
        for _ in range(5):
            with flight.claim("key", LONG_SECS) as held:
                inside += 1
                most = max(most, inside)
                time.sleep(0.001)
                inside -= 1
                turns.append((index, held))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_SECS)
    assert most == 1
    assert sorted(turns) == [(index, True) for index in range(8) for _ in range(5)]


def test_a_waiting_thread_gets_the_key_when_its_holder_is_done(flight: SingleFlight) -> None:
    with held_elsewhere(flight) as release:
        threading.Timer(0.05, release.set).start()
        with flight.claim("key", LONG_SECS) as held:
            assert held
            assert release.is_set()


def test_waiting_ends_when_its_time_is_over(flight: SingleFlight) -> None:
    with held_elsewhere(flight):
        begin = time.monotonic()
        with flight.claim("key", 0.05) as held:
            assert not held
        assert 0.04 < time.monotonic() - begin < LONG_SECS / 2


def test_without_a_wait_a_held_key_is_refused_at_once(flight: SingleFlight) -> None:
    with held_elsewhere(flight):
        begin = time.monotonic()
        with flight.claim("key", 0) as held:
            assert not held
        assert time.monotonic() - begin < LONG_SECS / 2


def test_without_a_wait_a_thread_meets_its_own_claim_and_does_not_deadlock(flight: SingleFlight) -> None:
    with flight.claim("key", LONG_SECS) as outer, flight.claim("key", 0) as inner:
        assert outer and not inner


def test_who_was_refused_does_not_release_the_holder(flight: SingleFlight) -> None:
    with held_elsewhere(flight):
        for _ in range(2):
            with flight.claim("key", 0) as held:
                assert not held


def test_keys_do_not_wait_for_each_other(flight: SingleFlight) -> None:
    with held_elsewhere(flight, "one"), flight.claim("other", 0) as held:
        assert held


def test_equal_keys_are_one_key(flight: SingleFlight) -> None:
    with held_elsewhere(flight, ("M", 1)), flight.claim(("M", 1), 0) as held:
        assert not held


def test_an_exception_releases_the_key_and_reaches_the_caller(flight: SingleFlight) -> None:
    with pytest.raises(KeyError, match="mine"), flight.claim("key", LONG_SECS):
        raise KeyError("mine")
    with flight.claim("key", 0) as held:
        assert held


def test_an_interrupted_wait_leaves_no_lock_behind(flight: SingleFlight) -> None:
    before = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored in what a shell starts in the background
    try:
        _interrupt_a_wait(flight)
    finally:
        signal.signal(signal.SIGINT, before)


def _interrupt_a_wait(flight: SingleFlight) -> None:
    with held_elsewhere(flight):

        def interrupt_once_it_waits() -> None:
            while flight._locks["key"][1] < 2:
                time.sleep(0.001)
            time.sleep(0.02)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

        threading.Thread(target=interrupt_once_it_waits).start()
        with pytest.raises(KeyboardInterrupt), flight.claim("key", LONG_SECS):
            pass


@pytest.mark.parametrize("text", ["1e6", "1e12", "1e300"])
def test_every_wait_that_the_setting_allows_can_be_waited(flight: SingleFlight, text: str) -> None:
    try:
        wait_secs = settings._from_environment({"SMART_AUTOTUNE_WAIT_SECS": text}).wait_secs
    except SettingsError:
        return  # refused with a reason: as good
    with flight.claim("key", wait_secs) as held:
        assert held


# ---- one process of several ----------------------------------------------------------------------------------------


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    once.forget()
    return tmp_path / "not" / "there" / "entry.json"


@contextmanager
def held_by_another_thread(path: Path) -> Iterator[None]:
    """To the lock another thread is as strange as another process: each has its own file open."""
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with one_process(path, LONG_SECS) as mine:
            assert mine
            holding.set()
            release.wait(LONG_SECS)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(LONG_SECS)
    try:
        yield
    finally:
        release.set()
        thread.join(LONG_SECS)


def test_a_free_entry_is_held_and_is_free_again_afterwards(entry: Path) -> None:
    for wait_secs in (LONG_SECS, 0, 0.0, -1, 1e300):
        with one_process(entry, wait_secs) as mine:
            assert mine
    assert not entry.exists()


@pytest.mark.parametrize("wait_secs", [0, 0.1])
def test_a_held_entry_is_refused_when_the_wait_is_over(entry: Path, wait_secs: float) -> None:
    with held_by_another_thread(entry), one_process(entry, wait_secs) as mine:
        assert not mine
    with one_process(entry, 0) as mine:
        assert mine


def test_entries_do_not_wait_for_each_other(entry: Path) -> None:
    with held_by_another_thread(entry), one_process(entry.with_name("other.json"), 0) as mine:
        assert mine


@pytest.mark.parametrize("wait_secs", [0, 0.1])
def test_a_thread_that_meets_its_own_entry_does_not_deadlock(entry: Path, wait_secs: float) -> None:
    with one_process(entry, LONG_SECS) as outer, one_process(entry, wait_secs) as inner:
        assert outer and not inner


def test_an_error_under_it_frees_it_and_reaches_the_caller(entry: Path) -> None:
    for error in (KeyError, OSError, TimeoutError, filelock.Timeout):
        with pytest.raises(error), one_process(entry, 0):
            raise error("mine")
    with one_process(entry, 0) as mine:
        assert mine


def test_without_a_path_or_with_sharing_off_nobody_waits(entry: Path) -> None:
    with one_process(None, 0) as one, one_process(None, 0) as other:
        assert one and other
    with held_by_another_thread(entry), settings.override(share="off"), one_process(entry, 0) as mine:
        assert mine


def test_where_no_lock_can_be_had_everyone_goes_on_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    once.forget()
    (tmp_path / "file").write_text("")
    for name in ("one", "other"):
        with one_process(tmp_path / "file" / name, LONG_SECS) as mine:
            assert mine
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.ENOLCK, errno.ESTALE, errno.EACCES])
def test_so_it_is_for_any_error_of_the_disk(
    entry: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr(filelock.FileLock, "acquire", fails)
    for _ in range(2):
        with one_process(entry, LONG_SECS) as mine:
            assert mine
    assert len([record for record in caplog.records if record.levelno == logging.WARNING]) == 1
