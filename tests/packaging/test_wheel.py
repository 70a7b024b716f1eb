"""What is in the wheel, and what it does in a fresh environment: the whole way from the variable to a record."""

from __future__ import annotations

import json
import sys
import tarfile
import textwrap
import zipfile

import pytest

from support.installed import TESTS, build_wheel, copied_sources, installed_from_index, run_child
from support.patching import on_the_verified_triton

ON = {"SMART_AUTOTUNE": "1"}
# A kernel of somebody who has never heard of us. The stand-in for a GPU comes from the tests.
SCRIPT = f"""
import json, multiprocessing, sys

early = sorted(name for name in sys.modules if name.partition(".")[0] in ("smart_autotune", "wrapt", "triton", "torch"))
sys.path.append({str(TESTS)!r})
import torch
import triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({{"BLOCK": 64}}), triton.Config({{"BLOCK": 128}})], key=["n"])
@triton.jit
def scaled(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) * 2, mask=offsets < n)

ours_without_asking = sorted(name for name in sys.modules if name.partition(".")[0] in ("smart_autotune", "wrapt"))

def launch(who):
    from support.stub_driver import StubDriver, active
    import smart_autotune
    with active(StubDriver(120)) as driver:
        for n in (1000, 1000, 500):
            scaled[(8,)](torch.zeros(1000), torch.zeros(1000), n)
    print(json.dumps({{
        "who": who, "early": early, "ours_without_asking": ours_without_asking, "triton": triton.__version__,
        "records": [record.kernel for record in smart_autotune.records()], "launches": len(driver.launches),
        "best": str(scaled.best_config), "enabled": smart_autotune.status().enabled,
        "file": smart_autotune.__file__,
    }}), flush=True)

if __name__ == "__main__":
    launch("parent")
    if "--alone" not in sys.argv:
        child = multiprocessing.get_context("spawn").Process(target=launch, args=("child",))
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "served.py"
    path.write_text(textwrap.dedent(SCRIPT), encoding="utf-8")
    return path


def reports(done):
    return {report["who"]: report for report in map(json.loads, done.stdout.splitlines())}


@on_the_verified_triton
def test_set_a_stock_kernel_goes_through_our_engine_in_the_parent_and_in_a_spawned_child(installed, script):
    done = installed.run(str(script), variables=ON)
    found = reports(done)
    assert found.keys() == {"parent", "child"}
    for report in found.values():
        assert report["enabled"] and report["records"] == ["scaled", "scaled"], "one for each of two keys"
        assert report["launches"] == 2 + 1 + 1 + 2 + 1
        assert report["file"].startswith(str(installed.packages))
        assert not {"triton", "torch"} & set(report["early"])
    assert done.stderr == ""


def test_unset_nothing_of_ours_is_imported_and_stock_tunes(installed, script):
    report = reports(installed.run(str(script), "--alone"))["parent"]
    assert report["early"] == [] and report["ours_without_asking"] == []
    assert not report["enabled"] and report["records"] == []
    assert report["launches"] == 2 + 1 + 1 + 2 + 1 and "BLOCK" in report["best"]


def test_with_triton_3_9_0_the_gate_refuses_says_so_once_and_the_stock_kernel_runs(installed, script):
    another = installed_from_index("triton-3.9.0", "triton==3.9.0")
    done = installed.run(str(script), variables=ON, first=[another])
    found = reports(done)
    assert found.keys() == {"parent", "child"}
    for report in found.values():
        assert report["triton"] == "3.9.0"
        assert not report["enabled"] and report["records"] == []
        assert report["launches"] == 2 + 1 + 1 + 2 + 1 and "BLOCK" in report["best"]
    refusal = "triton-3.6.0: expected triton==3.6.0, found triton 3.9.0; stock behaviour is left as it is"
    ours = [line for line in done.stderr.splitlines() if line.startswith(("smart_autotune", "triton-3.6.0"))]
    assert ours == [refusal] * 2, "once in each process"


def test_with_triton_3_9_0_strict_stops_the_import(installed):
    another = installed_from_index("triton-3.9.0", "triton==3.9.0")
    variables = {**ON, "SMART_AUTOTUNE_STRICT": "1"}
    done = installed.run("-c", "import triton", variables=variables, first=[another], check=False)
    assert done.returncode == 1
    assert "PatchRefused: triton-3.6.0: expected triton==3.6.0, found triton 3.9.0" in done.stderr


# ---- what is in it ---------------------------------------------------------------------------------------------------


def names_in(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def test_the_wheel_holds_the_package_the_patches_and_one_pth_and_nothing_else_at_the_top(wheel):
    names = names_in(wheel)
    assert {name.partition("/")[0] for name in names if not name.partition("/")[0].endswith(".dist-info")} == {
        "smart_autotune", "smart_autotune.pth",
    }  # fmt: skip
    for name in ("py.typed", "patches/gate.py", "patches/startup.py", "patches/site/sitecustomize.py"):
        assert f"smart_autotune/{name}" in names
    assert not [name for name in names if "test" in name or "integration" in name]


def test_every_module_of_the_checkout_is_in_the_wheel(wheel):
    root = TESTS.parent
    ours = {str(path.relative_to(root)) for path in (root / "smart_autotune").rglob("*.py")}
    patches = {f"smart_autotune/{path.relative_to(root)}" for path in (root / "patches").rglob("*.py")}
    assert {name for name in names_in(wheel) if name.endswith(".py")} == ours | patches


def test_the_record_lists_the_pth_so_that_uninstalling_removes_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (record,) = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
        assert "smart_autotune.pth,sha256=" in archive.read(record).decode()


def test_a_wheel_built_from_the_source_distribution_is_the_same(tmp_path, wheel):
    """Whoever builds from an sdist, as distributions do, gets the ``.pth`` too."""
    source = copied_sources(tmp_path / "sources")
    build = "from setuptools import build_meta; print(build_meta.build_sdist('out'))"
    done = run_child([sys.executable, "-c", build], cwd=source)
    name = done.stdout.splitlines()[-1]
    with tarfile.open(source / "out" / name) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    again = build_wheel(tmp_path / "unpacked" / name.removesuffix(".tar.gz"), tmp_path / "again")
    assert sorted(names_in(again)) == sorted(names_in(wheel))


def test_the_pth_is_the_one_of_the_checkout_and_one_line(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("smart_autotune.pth").decode()
    assert text == (TESTS.parent / "patches" / "site" / "smart_autotune.pth").read_text(encoding="utf-8")
    assert text.count("\n") == 1
