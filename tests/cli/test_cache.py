"""``smart-autotune cache``: listing and removing, beside processes that tune."""

import json
import multiprocessing
import os
import time

import pytest
from click.testing import CliRunner

from smart_autotune import settings
from smart_autotune.agreement import one_process
from smart_autotune.cli import main
from smart_autotune.store import Store, call_file
from support import kept, stored


def cache(*arguments, columns="160"):
    return CliRunner().invoke(main, ["cache", *map(str, arguments)], env={"COLUMNS": columns})


def with_call(path, age_days=0.0):
    """The entry's recorded call."""
    call_file(path).write_text('{"format": 1}\n')
    kept.age(call_file(path), age_days)
    return call_file(path)


# ---- path ------------------------------------------------------------------------------------------------------------


def test_the_path_is_the_one_that_the_settings_name(tmp_path):
    with settings.override(cache=True, cache_dir=str(tmp_path / "here")):
        assert cache("path").stdout == f"{tmp_path / 'here'}\n"
        assert json.loads(cache("path", "--json").stdout) == {"path": str(tmp_path / "here"), "exists": False}


def test_without_a_folder_there_is_no_path():
    result = cache("path")
    assert result.exit_code == 2 and "nothing is kept here" in result.stderr


# ---- ls --------------------------------------------------------------------------------------------------------------


def test_entries_are_listed_oldest_first_with_key_age_and_size(tmp_path):
    new, old = kept.entry(tmp_path, "decode"), kept.entry(tmp_path, "prefill", age_days=3.5)
    rows = [line for line in cache("ls", "--dir", tmp_path).stdout.splitlines() if "topk=512" in line]
    assert [row.split()[0] for row in rows] == ["prefill", "decode"]
    assert "3 d" in rows[0] and f"{new.stat().st_size:,}" in rows[1] and old.name in rows[0]


def test_json_lists_objects(tmp_path):
    path = kept.entry(tmp_path, complete=False)
    (row,) = json.loads(cache("ls", "--dir", tmp_path, "--json").stdout)
    assert row["file"] == str(path) and row["kernel"] == "decode" and row["bucket"] == 16
    assert row["complete"] is False and row["bytes"] == path.stat().st_size and row["error"] is None


def test_a_recorded_call_counts_with_its_entry_and_is_none_of_its_own(tmp_path):
    path = kept.entry(tmp_path)
    call = with_call(path)
    (row,) = json.loads(cache("ls", "--dir", tmp_path, "--json").stdout)
    assert row["file"] == str(path) and row["bytes"] == path.stat().st_size + call.stat().st_size
    assert ".call" not in cache("ls", "--dir", tmp_path).stdout


@pytest.mark.parametrize("pattern", ["prefill", "pre*", "package.module.prefill", "prefill-*.json"])
def test_entries_are_chosen_by_kernel_or_file(tmp_path, pattern):
    kept.entry(tmp_path, "decode")
    kept.entry(tmp_path, "prefill")
    assert [row["kernel"] for row in json.loads(cache("ls", pattern, "--dir", tmp_path, "--json").stdout)] == [
        "prefill"
    ]


def test_a_file_that_cannot_be_read_is_listed_with_its_reason(tmp_path):
    (tmp_path / "broken-0123.json").write_text("{")
    (row,) = json.loads(cache("ls", "broken", "--dir", tmp_path, "--json").stdout)
    assert row["kernel"] == "broken" and "JSONDecodeError" in row["error"]
    assert "unreadable" in cache("ls", "--dir", tmp_path).stdout


# ---- rm --------------------------------------------------------------------------------------------------------------


def test_what_is_named_is_removed_and_the_rest_stays(tmp_path):
    decode, prefill = kept.entry(tmp_path, "decode"), kept.entry(tmp_path, "prefill")
    result = cache("rm", "decode", "--dir", tmp_path)
    assert result.exit_code == 0 and "1 entries removed, 0 left" in result.stdout
    assert not decode.exists() and prefill.exists()


def test_the_recorded_call_goes_with_its_entry(tmp_path):
    decode, prefill = kept.entry(tmp_path, "decode"), kept.entry(tmp_path, "prefill")
    gone, stays = with_call(decode), with_call(prefill)
    cache("rm", "decode", "--dry-run", "--dir", tmp_path)
    assert gone.exists()
    assert cache("rm", "decode", "--dir", tmp_path).exit_code == 0
    assert not decode.exists() and not gone.exists() and prefill.exists() and stays.exists()


def test_removing_everything_takes_calls_without_an_entry_too(tmp_path):
    path = kept.entry(tmp_path)
    calls = [with_call(path), with_call(path.with_name("gone-0123.json")), with_call(tmp_path / "gone-4567.json")]
    cache("rm", "--all", "--dry-run", "--dir", tmp_path)
    cache("rm", "decode", "--dir", tmp_path)
    assert [call.exists() for call in calls] == [False, True, True]
    assert cache("rm", "--all", "--dir", tmp_path).exit_code == 0
    assert not any(call.exists() for call in calls)


def test_an_entry_whose_call_cannot_be_removed_stays(tmp_path):
    path = kept.entry(tmp_path)
    call_file(path).mkdir()
    result = cache("rm", "decode", "--dir", tmp_path)
    assert result.exit_code == 1 and "left, Is a directory" in result.stdout and path.exists()


def test_a_call_without_an_entry_that_cannot_be_removed_is_said(tmp_path):
    (tmp_path / "gone-0123.call").mkdir()
    result = cache("rm", "--all", "--dir", tmp_path)
    assert result.exit_code == 1 and "left, Is a directory: gone-0123.call" in result.stderr


def test_everything_is_removed_only_when_that_is_said(tmp_path):
    path = kept.entry(tmp_path)
    assert cache("rm", "--dir", tmp_path).exit_code == 2 and path.exists()
    assert cache("rm", "--all", "decode", "--dir", tmp_path).exit_code == 2 and path.exists()
    assert cache("rm", "--all", "--dir", tmp_path).exit_code == 0 and not path.exists()


def test_a_dry_run_removes_nothing(tmp_path):
    path = kept.entry(tmp_path)
    for arguments in (["rm", "decode"], ["prune", "--older-than", "0s"]):
        result = cache(*arguments, "--dry-run", "--dir", tmp_path)
        assert result.exit_code == 0 and "would be removed" in result.stdout and path.exists()


def test_a_name_that_nothing_has_is_an_error_and_nothing_is_removed(tmp_path):
    path = kept.entry(tmp_path)
    result = cache("rm", "decode", "prefil", "--dir", tmp_path)
    assert result.exit_code == 2 and "no entry 'prefil'" in result.stderr and path.exists()


def test_json_says_what_became_of_each(tmp_path):
    path = kept.entry(tmp_path)
    (row,) = json.loads(cache("rm", "decode", "--dir", tmp_path, "--json").stdout)
    assert (row["file"], row["fate"]) == (str(path), "removed")


def hold(path, held, release):
    with one_process(path, 30) as mine:
        held.put(mine)
        release.wait(60)


def test_an_entry_that_another_process_is_tuning_is_left_and_said(tmp_path):
    path = kept.entry(tmp_path)
    call = with_call(path)
    context = multiprocessing.get_context("spawn")
    held, release = context.Queue(), context.Event()
    tuner = context.Process(target=hold, args=(path, held, release))
    tuner.start()
    assert held.get(timeout=60) is True
    result = cache("rm", "decode", "--dir", tmp_path)
    release.set()
    tuner.join(60)
    assert result.exit_code == 1 and "left, a process is tuning it" in result.stdout and path.exists() and call.exists()
    assert cache("rm", "decode", "--dir", tmp_path).exit_code == 0 and not path.exists()


def test_a_removed_key_can_be_kept_and_read_again(tmp_path):
    path = kept.entry(tmp_path)
    cache("rm", "--all", "--dir", tmp_path)
    store, key = Store(tmp_path), stored.key()
    assert store.load(key, stored.CONFIGS, stored.LIMITS) is None
    with settings.override(share="host"), one_process(store.path(key), 10) as mine:
        store.save(stored.record(key))
    assert mine and store.load(key, stored.CONFIGS, stored.LIMITS) is not None and path.parent.is_dir()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may remove everything")
def test_a_folder_that_does_not_let_us_is_said(tmp_path):
    path = kept.entry(tmp_path)
    path.parent.chmod(0o500)
    try:
        result = cache("rm", "decode", "--dir", tmp_path)
    finally:
        path.parent.chmod(0o700)
    assert result.exit_code == 1 and "Permission denied" in result.stdout and path.exists()


def test_removal_that_the_system_refuses_is_said(tmp_path, monkeypatch):
    path = kept.entry(tmp_path)

    def refused(self, missing_ok=False):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as scope:
        scope.setattr(type(path), "unlink", refused)
        result = cache("rm", "decode", "--dir", tmp_path)
    assert result.exit_code == 1 and "left, Permission denied" in result.stdout and path.exists()


def save_again_and_again(folder, seconds):
    store, key = Store(folder), stored.key()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        store.save(stored.record(key))
        found = store.load(key, stored.CONFIGS, stored.LIMITS)
        assert found is None or len(found.verdicts) == 4


def test_servers_that_write_and_read_meanwhile_see_whole_entries_or_none(tmp_path):
    context = multiprocessing.get_context("spawn")
    servers = [context.Process(target=save_again_and_again, args=(str(tmp_path), 2.0)) for _ in range(2)]
    for server in servers:
        server.start()
    while any(server.is_alive() for server in servers):
        for command in (["ls"], ["rm", "--all"], ["prune", "--older-than", "0s"]):
            assert cache(*command, "--dir", tmp_path).exit_code == 0
    for server in servers:
        server.join()
        assert server.exitcode == 0


# ---- prune -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age", "left"), [("30d", 2), ("4d", 1), ("4w", 2), ("1h", 1), ("120m", 1), ("0.5d", 1)])
def test_what_is_older_is_removed(tmp_path, age, left):
    kept.entry(tmp_path, n=1)
    kept.entry(tmp_path, n=2, age_days=5)
    assert cache("prune", "--older-than", age, "--dir", tmp_path).exit_code == 0
    assert len(list(tmp_path.glob("triton-*/*.json"))) == left


def test_the_call_of_what_is_older_is_removed_with_it_whatever_its_own_age(tmp_path):
    young, old = kept.entry(tmp_path, n=1), kept.entry(tmp_path, n=2, age_days=5)
    stays, gone = with_call(young, age_days=5), with_call(old)
    assert cache("prune", "--older-than", "1d", "--dir", tmp_path).exit_code == 0
    assert stays.exists() and not gone.exists()


def test_a_call_without_an_entry_is_pruned_by_its_own_age(tmp_path):
    folder = kept.entry(tmp_path).parent
    young, old = with_call(folder / "a-0123.json"), with_call(folder / "b-0123.json", age_days=5)
    cache("prune", "--older-than", "1d", "--dry-run", "--dir", tmp_path)
    cache("prune", "--older-than", "1d", "--kernel", "none", "--dir", tmp_path)
    assert old.exists()
    assert cache("prune", "--older-than", "1d", "--dir", tmp_path).exit_code == 0
    assert young.exists() and not old.exists()


def test_only_the_named_kernels_are_pruned(tmp_path):
    decode, prefill = kept.entry(tmp_path, "decode", age_days=5), kept.entry(tmp_path, "prefill", age_days=5)
    cache("prune", "--older-than", "1d", "--kernel", "pre*", "--dir", tmp_path)
    assert decode.exists() and not prefill.exists()


def test_what_killed_writers_left_and_locks_without_an_entry_go_too(tmp_path):
    path = kept.entry(tmp_path)
    names = {
        ".decode.json.1-ab.tmp": (1, False),  # by name: days old, whether it stays
        ".decode.json.2-cd.tmp": (0, True),
        "gone-0123.json.lock": (3, False),
        "new-0123.json.lock": (0, True),
        f"{path.name}.lock": (3, True),
        "notes.txt": (9, True),
    }
    for name, (days, _) in names.items():
        (path.parent / name).write_text("")
        kept.age(path.parent / name, days)
    cache("prune", "--older-than", "30d", "--dir", tmp_path)
    assert {name: (path.parent / name).exists() for name in names} == {
        name: stays for name, (_, stays) in names.items()
    }
    assert path.exists()


@pytest.mark.parametrize("age", ["", "30", "d", "-1d", "1y", "1 d", "1e3s", "infd"])
def test_an_age_that_is_none_is_refused_with_examples(tmp_path, age):
    path = kept.entry(tmp_path, age_days=9)
    result = cache("prune", f"--older-than={age}", "--dir", tmp_path)
    assert result.exit_code == 2 and "12h or 30d" in result.stderr and path.exists()


def test_prune_without_an_age_is_refused(tmp_path):
    assert cache("prune", "--dir", tmp_path).exit_code == 2
