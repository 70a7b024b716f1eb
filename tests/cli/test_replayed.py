"""``smart-autotune audit --from``: a server's log in, tables or JSON out, and an exit status that a script can use."""

import json

import pytest
from click.testing import CliRunner

from smart_autotune import recorder, settings, smart_autotune
from smart_autotune.cli import main
from support import recorded_kernels as kernels
from support.kernels import fresh, tile, tile_arguments, tile_product
from support.stub_driver import StubDriver, active

FIELDS = [
    "kernel", "arch", "example", "config", "outcome", "need", "limit", "unit", "registers", "spill_bytes",
    "compile_secs", "reason", "recorded_outcome", "recorded_on", "keys",
]  # fmt: skip


@pytest.fixture
def log(tmp_path):
    """Two keys of one kernel and one of another, tuned on sm_90."""
    recorder.forget()
    path = tmp_path / "log.jsonl"
    with active(StubDriver(90)), settings.override(log=str(path)):
        loose = smart_autotune(configs=[tile(2), tile(9, warps=8)], key=["K"])(fresh(kernels.product))
        for k in (64, 128):
            loose[(1,)](*tile_arguments(k))
        tight = smart_autotune(configs=[tile(9, warps=8), tile(10, warps=8)], key=["K"])(fresh(tile_product))
        tight[(1,)](*tile_arguments())
    return path


def audit(*arguments, columns="140"):
    return CliRunner().invoke(main, ["audit", *map(str, arguments)], env={"COLUMNS": columns})


def test_every_recorded_call_has_a_table_for_each_arch_and_the_end_sums_up(log):
    result = audit("--from", log, "--arch", "sm_90", "--arch", "sm_120")
    assert result.exit_code == 3, result.output
    for head in ("product on sm_90, recorded call", "product on sm_120, recorded call", "tile_product on sm_120"):
        assert head in result.stdout
    assert "and 1 more" in result.stdout and "OVER_SHARED_MEMORY" in result.stdout
    *_, ninety, hundred_twenty, unserved = result.stdout.splitlines()
    assert ninety == "sm_90: 2 kernels, 2 different calls (3 keys); 2 calls have a config that fits"
    assert hundred_twenty == "sm_120: 2 kernels, 2 different calls (3 keys); 1 calls have a config that fits"
    assert unserved.startswith("  no config fits: tile_product [K=64")


def test_all_fit_is_zero(log):
    assert audit("--from", log, "--arch", "sm_90").exit_code == 0


def test_json_is_a_list_of_objects_with_what_was_recorded(log):
    result = audit("--from", log, "--arch", "sm_120", "--json", "--kernel", "product")
    rows = json.loads(result.stdout)
    assert result.exit_code == 0 and all(list(row) == FIELDS for row in rows)
    assert {row["recorded_on"] for row in rows} == {"sm_90"} and len(rows[0]["keys"]) == 2
    fits, over = sorted(rows, key=lambda row: row["need"])
    assert (fits["outcome"], fits["need"], fits["limit"]) == ("NOT_TIMED", 16_384, 101_376)
    assert (over["outcome"], over["need"]) == ("OVER_SHARED_MEMORY", 131_072)
    assert {fits["recorded_outcome"], over["recorded_outcome"]} == {"WON", "SLOWER"}


@pytest.fixture
def kept(tmp_path):
    """A cache folder of what ``log`` logs, tuned on sm_90 without a log."""
    recorder.forget()
    with active(StubDriver(90)), settings.override(cache=True, cache_dir=str(tmp_path / "kept")):
        loose = smart_autotune(configs=[tile(2), tile(9, warps=8)], key=["K"])(fresh(kernels.product))
        for k in (64, 128):
            loose[(1,)](*tile_arguments(k))
        tight = smart_autotune(configs=[tile(9, warps=8), tile(10, warps=8)], key=["K"])(fresh(tile_product))
        tight[(1,)](*tile_arguments())
    return tmp_path / "kept"


def test_a_cache_folder_gives_the_same_verdicts_and_exit_status_as_a_log(log, kept):
    from_log, from_cache = (audit("--from", path, "--arch", "sm_120", "--json") for path in (log, kept))
    assert from_log.exit_code == from_cache.exit_code == 3 and from_cache.stderr == ""
    same = ("kernel", "arch", "outcome", "need", "limit", "registers", "reason", "recorded_on", "config")
    rows = [
        sorted(str([row[name] for name in same]) for row in json.loads(result.stdout))
        for result in (from_log, from_cache)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 4


def test_kept_tunings_without_a_call_are_counted_on_stderr(kept):
    next(kept.rglob("tile_product*.call")).unlink()
    result = audit("--from", kept, "--arch", "sm_120", "--json")
    assert result.exit_code == 0 and {row["kernel"] for row in json.loads(result.stdout)} == {"product"}
    assert f"1 kept tunings of {kept} have no recorded call: tune them again" in result.stderr


def test_a_cache_folder_without_calls_is_refused_with_a_remedy(kept):
    for call in kept.rglob("*.call"):
        call.unlink()
    result = audit("--from", kept, "--arch", "sm_120")
    assert result.exit_code == 2 and "3 kept tunings and no recorded call" in result.stderr
    assert "SMART_AUTOTUNE_LOG=PATH" in result.stderr


def test_a_kernel_is_chosen_by_a_pattern(log):
    result = audit("--from", log, "--arch", "sm_90", "--kernel", "tile_*", "--json")
    assert {row["kernel"] for row in json.loads(result.stdout)} == {"tile_product"}


def test_a_kernel_that_cannot_be_imported_is_named_and_the_others_are_compiled(log):
    log.write_text(log.read_text().replace('"module": "support.kernels"', '"module": "gone.kernels"').replace(
        tile_product.fn.__code__.co_filename, "/no/such/file.py"))  # fmt: skip
    result = audit("--from", log, "--arch", "sm_90")
    assert result.exit_code == 4
    assert "product on sm_90" in result.stdout
    last = result.stdout.splitlines()[-1]
    assert last.startswith("  not compiled: tile_product: cannot import gone.kernels: ModuleNotFoundError")
    rows = json.loads(audit("--from", log, "--arch", "sm_90", "--json").stdout)
    (lost,) = [row for row in rows if row["outcome"] == "NOT_REPLAYED"]
    assert sorted(lost) == sorted(FIELDS) and "cannot import gone.kernels" in lost["reason"]


def test_lines_that_are_no_records_are_counted_on_stderr(log):
    with log.open("a") as file:
        file.write('{"format": 1, "con\n')
    result = audit("--from", log, "--arch", "sm_90", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)
    assert f"1 lines of {log} were not used: no JSON" in result.stderr


def test_what_a_kernels_module_prints_does_not_reach_stdout(log, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "talkative_recorded.py").write_text("print('hello')\nfrom support.recorded_kernels import product\n")
    log.write_text(log.read_text().replace('"module": "support.recorded_kernels"', '"module": "talkative_recorded"'))
    result = audit("--from", log, "--arch", "sm_90", "--json", "--kernel", "product")
    assert json.loads(result.stdout) and "hello" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--from", "/no/such/log", "--arch", "sm_90"], "/no/such/log cannot be read: No such file or directory"),
        (["--from", "{log}", "--arch", "sm_95"], "known: sm_70, sm_75, sm_80"),
        (["--from", "{log}", "--arch", "sm_90", "--kernel", "x*"], "no kernel 'x*' in"),
        (["--from", "{log}"], "Missing option '--arch'"),
        (["--from", "{log}", "json", "--arch", "sm_90"], "one of the two"),
        (["--arch", "sm_90"], "one of the two"),
        (["support.audited_kernels", "--arch", "sm_90", "--kernel", "x"], "--kernel goes with --from"),
    ],
)
def test_bad_arguments_exit_with_two_and_say_what_would_do(log, arguments, text):
    result = audit(*[argument.format(log=log) for argument in arguments])
    assert result.exit_code == 2 and result.stdout == ""
    assert text in result.stderr


def test_the_help_says_what_can_be_read_and_whom_to_trust():
    text = " ".join(audit("--help").stdout.split())
    assert "LOG_OR_CACHE" in text and "SMART_AUTOTUNE_LOG" in text and "beside the kept tunings" in text
    assert "read only logs and folders that you trust" in text
