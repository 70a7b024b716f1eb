"""``smart-autotune report``: what the kept tunings say, whole or not."""

import json

import pytest
from click.testing import CliRunner

from smart_autotune import settings, smart_autotune
from smart_autotune.cli import main
from support import kept
from support.kernels import fresh, tile, tile_arguments, tile_product


def report(*arguments, columns="160"):
    return CliRunner().invoke(main, ["report", *map(str, arguments)], env={"COLUMNS": columns})


def test_kernel_key_bucket_winner_spread_and_drops_with_reasons_are_shown(tmp_path):
    kept.entry(tmp_path)
    result = report(tmp_path)
    assert result.exit_code == 0, result.output
    row = next(line for line in result.stdout.splitlines() if line.startswith("decode "))
    for text in ("topk=512", " 16 ", "BLOCK=16 w4 s3", "12.5", "12.0..13.2", "1/3"):
        assert text in row
    assert "decode: dropped 1 x OVER_SHARED_MEMORY: BLOCK=16 w8 s3 needs 262,144 of 232,448 bytes" in result.stdout
    assert "decode: dropped 1 x COMPILE_FAILED: CompilationError: power of 2" in result.stdout
    assert result.stdout.splitlines()[-1] == f"1 tunings of 1 kernels in {tmp_path}"


def test_what_a_tuner_left_is_what_is_shown(sm_120, tmp_path):
    with settings.override(cache=True, cache_dir=str(tmp_path)):
        kernel = smart_autotune(configs=[tile(2), tile(9, warps=8)], key=["K"])(fresh(tile_product))
        kernel[(1,)](*tile_arguments())
        (row,) = json.loads(report("--json").stdout)
    record = kernel.records[0]
    assert (row["kernel"], row["key"], row["bucket"]) == ("tile_product", record.key.describe(), 64)
    assert row["complete"] is True and row["served_by"] == "tuned" and row["environment"]["triton"]
    found = [(c["config"], c["outcome"], c["need"], c["limit"]) for c in row["configs"]]
    assert found == [
        ("BM=64, BN=64, BK=64, num_warps=4, num_stages=2", "WON", 16_384, 101_376),
        ("BM=64, BN=64, BK=64, num_warps=8, num_stages=9", "OVER_SHARED_MEMORY", 131_072, 101_376),
    ]


def test_verbose_shows_the_table_of_each_tuning(tmp_path):
    kept.entry(tmp_path)
    text = report(tmp_path, "-v").stdout
    assert "BLOCK=16, num_warps=8, num_stages=3" in text and "served by tuned; 1.50 s compiling" in text


def test_a_kernel_is_chosen_by_a_pattern(tmp_path):
    kept.entry(tmp_path, "decode")
    kept.entry(tmp_path, "prefill")
    for pattern in ("pre*", "package.module.prefill"):
        assert [row["kernel"] for row in json.loads(report(tmp_path, "--json", "--kernel", pattern).stdout)] == [
            "prefill"
        ]


def test_an_unfinished_tuning_is_called_that(tmp_path):
    kept.entry(tmp_path, complete=False)
    assert "(unfinished)" in report(tmp_path).stdout
    assert json.loads(report(tmp_path, "--json").stdout)[0]["complete"] is False


GOOD = {"format": 1, "key": {}, "verdicts": []}
BAD = {
    "no json": ("{", "JSONDecodeError"),
    "deep": ("[" * 100_000, "RecursionError"),
    "a list": ("[]", "not a kept tuning"),
    "another file": ('{"a": 1}', "not a kept tuning"),
    "another format": (json.dumps({**GOOD, "format": 99}), "format 99"),
    "a key of no kind": (json.dumps({**GOOD, "key": 5}), "key is no object"),
    "values of no kind": (json.dumps({**GOOD, "key": {"values": 5}}), "a int where an object is expected"),
    "verdicts of no kind": (json.dumps({**GOOD, "verdicts": 5}), "verdicts are no list"),
    "a verdict of no kind": (json.dumps({**GOOD, "verdicts": [5]}), "a int where an object"),
    "an unknown outcome": (json.dumps({**GOOD, "verdicts": [{"outcome": "LOST"}]}), "outcome 'LOST' is not known"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_file_that_is_no_entry_is_named_with_its_reason_and_the_rest_is_shown(tmp_path, name):
    text, reason = BAD[name]
    kept.entry(tmp_path)
    bad = tmp_path / "bad-0123.json"
    bad.write_text(text)
    result = report(tmp_path)
    assert result.exit_code == 0 and "1 tunings of 1 kernels" in result.stdout
    line = next(line for line in result.stdout.splitlines() if line.startswith(str(bad)))
    assert reason in line
    assert {"error", "file", "kernel"} in [set(row) for row in json.loads(report(tmp_path, "--json").stdout)]


def test_odd_values_of_an_entry_are_shown_or_left_out_but_never_obeyed(tmp_path):
    odd = {
        **GOOD, "kernel": "a\x1b[2Jb", "complete": 1, "created": "x", "compile_secs": 1e300, "notes": 5,
        "key": {"kernel": 5, "values": {"n": 5, "m": ["int"], "s": ["str", "\x07"]}, "batch": ["q", "x"]},
        "verdicts": [{"outcome": "OVER_SHARED_MEMORY", "config": {"kwargs": {"B": {"float": "0.5"}}, "num_warps": []},
                      "need": "x", "median_us": True, "spread_us": [1]}],
    }  # fmt: skip
    (tmp_path / "odd.json").write_text(json.dumps(odd))
    result = report(tmp_path, "-v")
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.stdout and "\x07" not in result.stdout and "a [2Jb" in result.stdout


def test_an_empty_folder_is_nothing_tuned(tmp_path):
    result = report(tmp_path)
    assert (result.exit_code, result.stdout) == (0, f"0 tunings of 0 kernels in {tmp_path}\n")
    assert json.loads(report(tmp_path, "--json").stdout) == []


def test_a_folder_that_is_not_there_is_a_bad_argument(tmp_path):
    result = report(tmp_path / "no")
    assert result.exit_code == 2 and "is not a folder" in result.stderr


def test_without_a_folder_and_with_keeping_switched_off_it_asks_for_one():
    result = report()  # the tests' settings keep nothing
    assert result.exit_code == 2 and "SMART_AUTOTUNE_CACHE=0" in result.stderr


def test_piped_output_has_no_colour_and_keeps_to_the_width(tmp_path):
    kept.entry(tmp_path)
    lines = report(tmp_path, columns="80").stdout.splitlines()
    assert all(len(line) <= 80 for line in lines[:4]) and "\x1b" not in "".join(lines)
