"""``smart-autotune audit``: exit codes, the two outputs, nothing else on stdout."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from smart_autotune.cli import main

MODULE = "support.audited_kernels"
FIELDS = [
    "kernel", "arch", "example", "config", "outcome", "need", "limit", "unit", "registers", "spill_bytes",
    "compile_secs",
]  # fmt: skip


def audit(*arguments, columns="120"):
    return CliRunner().invoke(main, ["audit", *arguments], env={"COLUMNS": columns})


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that can be imported; returns its name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


@pytest.mark.blackwell
def test_the_table_shows_what_fits_and_by_how_much_the_rest_is_over():
    result = audit(f"{MODULE}:matmul", "--arch", "sm_120")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == "matmul on sm_120, example square: 101,376 bytes of shared memory a block"
    over = next(line for line in lines if "OVER_SHARED_MEMORY" in line)
    assert [word for word in over.split() if "," in word][-3:] == ["196,608", "101,376", "95,232"]
    assert any("8,192" in line and "fits" in line for line in lines)
    assert "5 offered, 1 fit; dropped:" in result.stdout and "smallest need 8,192 of 101,376 bytes" in result.stdout


@pytest.mark.blackwell
def test_the_assembler_does_not_print_on_stdout():
    result = audit(f"{MODULE}:matmul", "--arch", "sm_120")
    assert "ASSEMBLER_FAILED" in result.stdout
    assert ".visible .entry" not in result.output and "reproducer" not in result.output


def test_the_table_is_plain_text_within_eighty_columns():
    result = audit(f"{MODULE}:matmul", "--arch", "sm_90", columns="80")
    assert "\x1b" not in result.stdout
    table = [line for line in result.stdout.splitlines() if "fits" in line or "OVER" in line or "─" in line]
    assert len(table) >= 3 and max(map(len, table[:-1])) <= 80


def test_json_is_a_list_of_objects_with_exactly_these_fields():
    result = audit(f"{MODULE}:matmul", "--arch", "sm_90", "--arch", "sm_80", "--json")
    rows = json.loads(result.stdout)
    assert result.exit_code == 0 and len(rows) == 10
    assert all(list(row) == FIELDS for row in rows)
    assert [row["arch"] for row in rows] == ["sm_90"] * 5 + ["sm_80"] * 5
    first = rows[0]
    assert (first["outcome"], first["need"], first["limit"], first["unit"]) == ("NOT_TIMED", 16_384, 232_448, "bytes")
    assert rows[4]["outcome"] == "PRUNED_BY_USER" and rows[4]["compile_secs"] is None


def test_every_kernel_of_the_module_is_audited_once():
    rows = json.loads(audit(MODULE, "--arch", "sm_90", "--json").stdout)
    assert {row["kernel"] for row in rows} == {"matmul", "with_descriptor"}


def test_a_kernel_with_no_fitting_config_on_one_arch_exits_with_three(module):
    name = module("tight", TIGHT)
    assert audit(name, "--arch", "sm_90").exit_code == 0
    result = audit(name, "--arch", "sm_90", "--arch", "sm_86")
    assert result.exit_code == 3 and "1 offered, 0 fit" in result.stdout


def test_a_failed_compiler_pass_is_one_line_and_not_its_module(module, capfd):
    result = audit(module("unpipelined", UNPIPELINED), "--arch", "sm_100")
    assert result.exit_code == 3 and "COMPILE_FAILED" in result.stdout
    assert "doesn't know how to predicate this op" in result.stdout
    shown = result.output + "".join(capfd.readouterr())
    assert "tt.func" not in shown and "mlir_reproducer" not in shown


def test_what_a_module_prints_does_not_reach_stdout(module):
    result = audit(module("talkative", "print('hello')\n" + TIGHT), "--arch", "sm_90", "--json")
    assert len(json.loads(result.stdout)) == 1 and "hello" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([MODULE, "--arch", "sm_95"], "known: sm_70, sm_75, sm_80"),
        (["no_such_module", "--arch", "sm_90"], "cannot import 'no_such_module': ModuleNotFoundError"),
        ([f"{MODULE}:matmull", "--arch", "sm_90"], "there: matmul"),
        ([f"{MODULE}:plain", "--arch", "sm_90"], "no smart-autotuned kernel 'plain'"),
        (["json", "--arch", "sm_90"], "has no smart-autotuned kernel"),
        ([":matmul", "--arch", "sm_90"], "cannot import ''"),
        ([MODULE], "Missing option '--arch'"),
    ],
)
def test_bad_arguments_exit_with_two_and_say_what_is_there(arguments, text):
    result = audit(*arguments)
    assert result.exit_code == 2 and result.stdout == ""
    assert text in result.stderr


def test_a_module_that_raises_is_one_line(module):
    result = audit(module("broken", "raise RuntimeError('first\\nsecond')"), "--arch", "sm_90")
    assert result.exit_code == 2 and len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("Error: cannot import 'broken': RuntimeError")


def test_a_kernel_without_examples_is_a_bad_argument(module):
    result = audit(module("bare", TIGHT.replace("examples=", "batch=None and ")), "--arch", "sm_90")
    assert result.exit_code == 2 and "kernel plain has no examples" in result.stderr


def test_the_command_runs_as_a_module_from_the_folder_of_the_kernels(tmp_path):
    (tmp_path / "local_kernels.py").write_text("import smart_autotune\n")
    command = [sys.executable, "-m", "smart_autotune.cli", "audit", "local_kernels", "--arch", "sm_90"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "module local_kernels has no smart-autotuned kernel" in done.stderr


TIGHT = """
from smart_autotune import smart_autotune
from support import audited_kernels as kernels

kernel = smart_autotune(
    configs=[kernels.tile(128, 256, 64, warps=8, stages=4)], key=["M"], examples=kernels.examples
)(kernels.plain)
"""

UNPIPELINED = """
import torch
import triton
import triton.language as tl
from smart_autotune import smart_autotune


@smart_autotune(
    configs=[triton.Config({"BLOCK": 64}, num_stages=3)],
    key=[],
    examples=lambda: [{"x_ptr": torch.empty(64, 64, dtype=torch.float16, device="meta"), "count": 64}],
)
@triton.jit
def kernel(x_ptr, count, BLOCK: tl.constexpr):
    o = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK, BLOCK), tl.float32)
    for i in range(count):
        b = tl.load(x_ptr + i * BLOCK * BLOCK + o[:, None] * BLOCK + o[None, :])
        b = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [b], dtype=b.dtype, is_pure=False, pack=2
        )
        sums = tl.dot(b, b, sums)
    tl.store(x_ptr + o[:, None] * BLOCK + o[None, :], sums.to(tl.float16))
"""
