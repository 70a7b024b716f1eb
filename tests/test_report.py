"""Tables and lines made of verdicts."""

import re

import pytest
import triton

from smart_autotune import report
from smart_autotune.audit import Audit
from smart_autotune.key import TuningKey
from smart_autotune.limits import DeviceLimits
from smart_autotune.verdict import Outcome, TuningRecord, Verdict

LIMITS = DeviceLimits("sm_120", 101_376)
KEY = TuningKey("kernel", (("arch", "sm_120"), ("shared_bytes", 101_376)), (("topk", "int", 512),), (), ("q", 16))


def config(block=16, **options):
    return triton.Config({"BLOCK_T": block, "BLOCK_H": 16}, num_stages=2, **options)


def over(block, need):
    return Verdict(config(block), Outcome.OVER_SHARED_MEMORY, need, 101_376, "bytes", "3,328 bytes over", registers=255)


FITS = Verdict(config(), Outcome.NOT_TIMED, 61_568, 101_376, "bytes", registers=128, spill_bytes=0)
FAILED = Verdict(config(7), Outcome.COMPILE_FAILED, detail="CompilationError: power of 2")
VERDICTS = (FITS, over(32, 104_704), FAILED, FAILED, Verdict(config(64), Outcome.PRUNED_BY_USER))


def rendered(columns, color=False, verdicts=VERDICTS):
    return report.render_audit(Audit("decode", LIMITS, "decode 16", verdicts), columns, color)


def test_numbers_have_thousands_separators_and_the_excess_is_shown():
    text = rendered(140)
    row = next(line for line in text.splitlines() if "OVER_SHARED_MEMORY" in line)
    assert row.startswith("BLOCK_T=32, BLOCK_H=16, num_warps=4, num_stages=2")
    assert row.split()[-6:] == ["104,704", "101,376", "255", "OVER_SHARED_MEMORY", "3,328"][-6:] or row.endswith(
        "3,328"
    )


def test_an_offline_fit_is_called_fits_and_shows_no_excess():
    row = next(line for line in rendered(140).splitlines() if "fits" in line)
    assert row.split()[-5:] == ["61,568", "101,376", "128", "0", "fits"]


@pytest.mark.parametrize("columns", [80, 100, 140, 200])
def test_the_table_keeps_to_its_width_and_every_verdict_stays_whole(columns):
    lines = rendered(columns).splitlines()[1:-2]
    table = [line for line in lines if not line.startswith("COMPILE_FAILED (")]
    assert max(map(len, table)) <= columns
    assert sum("OVER_SHARED_MEMORY" in line for line in table) == 1
    assert sum("104,704" in line and "101,376" in line for line in table) == 1


def test_narrow_tables_write_configs_short():
    assert "BLOCK_T=16 BLOCK_H=16" in rendered(80) and "num_warps" not in rendered(80)


def test_there_is_no_colour_unless_asked_for():
    assert "\x1b" not in rendered(100)
    colored = rendered(100, color=True)
    assert "\x1b[32m" in colored
    plain = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    assert [line.rstrip() for line in plain.splitlines()] == rendered(100).splitlines()


def test_each_reason_is_said_once_with_its_count():
    lines = rendered(120).splitlines()
    assert lines.count("COMPILE_FAILED (2): CompilationError: power of 2") == 1


def test_a_unit_other_than_bytes_is_said():
    columns = Verdict(config(), Outcome.OVER_TENSOR_MEMORY, 608, 512, "columns")
    lines = rendered(120, verdicts=(FITS, columns)).splitlines()
    assert "OVER_TENSOR_MEMORY: need, limit and excess in columns" in lines


def test_the_summary_counts_what_was_offered_fits_and_was_dropped():
    assert report.summary(VERDICTS) == (
        "5 offered, 1 fit; dropped: 2 COMPILE_FAILED, 1 OVER_SHARED_MEMORY, 1 PRUNED_BY_USER; "
        "smallest need 61,568 of 101,376 bytes"
    )
    assert report.summary((FAILED,)) == "1 offered, 0 fit; dropped: 1 COMPILE_FAILED"


def test_a_lowered_cap_is_marked_in_the_heading():
    limits = DeviceLimits("sm_90", 101_376, what_if=True)
    text = report.render_audit(Audit("decode", limits, "0", (FITS,)), 120)
    assert text.splitlines()[0] == "decode on sm_90, example 0: 101,376 bytes of shared memory a block (what-if)"


def test_square_brackets_in_a_config_are_text_not_markup():
    odd = Verdict(triton.Config({"SHAPE": "[red]"}), Outcome.NOT_TIMED, 1, 2, "bytes")
    assert "SHAPE=[red]" in rendered(120, verdicts=(odd,))


def test_a_config_written_short_keeps_what_is_unusual():
    odd = triton.Config({"B": 1}, num_warps=8, num_stages=3, num_ctas=2, maxnreg=128)
    assert report.shorten(odd) == "B=1 w8 s3 ctas2 regs<=128"


def test_a_record_is_explained_with_its_times_and_cold_keys():
    won = Verdict(config(), Outcome.WON, 61_568, 101_376, "bytes", median_us=1234.56)
    record = TuningRecord("decode", KEY, (won, over(32, 104_704)), "tuned", 1.5, 0.25, "q -> bucket 16", ("a note",))
    text = report.explain("decode", [record], [KEY], columns=140)
    lines = text.splitlines()
    assert lines[0] == "decode: topk=512 batch(q)<=16 on sm_120 (101376 B)"
    assert "batch: q -> bucket 16" in lines and "a note" in lines
    assert next(line for line in lines if "WON" in line).endswith("1,234.6")
    assert "served by tuned; 1.50 s compiling, 0.25 s timing" in lines
    assert lines[-1] == "served cold: topk=512 batch(q)<=16 on sm_120 (101376 B)"


def test_a_kernel_that_was_never_tuned_says_so():
    assert report.explain("decode", []) == "decode: nothing tuned yet\n"
