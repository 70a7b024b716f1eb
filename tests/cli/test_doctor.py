"""``smart-autotune doctor``: each thing that can be wrong is a finding with a remedy, and CUDA is left alone."""

import importlib.metadata
import json
import os
import sys

import pytest
from click.testing import CliRunner

from smart_autotune import settings
from smart_autotune.cli import doctor as _command  # noqa: F401  # the module, before the name is the command
from smart_autotune.cli import main
from support import kept
from support.installed import run_child
from support.patching import on_the_verified_triton
from support.stub_driver import StubDriver, active

module = sys.modules["smart_autotune.cli.doctor"]


def doctor(*arguments):
    return CliRunner().invoke(main, ["doctor", *arguments], env={"COLUMNS": "140"})


def findings(**options):
    return {finding.check: finding for finding in module.findings(**options)}


def in_settings(**variables):
    return {finding.check: finding for finding in module.settings_in(variables)}


@pytest.fixture
def cache(tmp_path):
    with settings.override(cache=True, cache_dir=str(tmp_path / "kept")):
        yield tmp_path / "kept"


# ---- the command -----------------------------------------------------------------------------------------------------


@on_the_verified_triton
def test_a_sound_environment_exits_with_zero_and_says_what_it_saw(cache):
    result = doctor()
    assert result.exit_code == 0, result.output
    for text in ("Triton", "its source unchanged", "ptxas-blackwell", "C compiler", f"{cache}: writable, 0 entries"):
        assert text in result.stdout
    assert "0 failed" in result.stdout.splitlines()[-1] and "\x1b" not in result.stdout


def test_json_is_a_list_of_findings(cache):
    rows = json.loads(doctor("--json").stdout)
    assert all(list(row) == ["check", "status", "found", "remedy"] for row in rows)
    assert {row["status"] for row in rows} <= {"ok", "note", "warning", "failed"}


def test_a_failed_check_exits_with_one_and_its_remedy_is_shown(cache, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    result = doctor()
    assert result.exit_code == 1
    assert "C compiler: Triton builds its launchers with one: install gcc" in result.stdout


def test_a_check_that_cannot_be_made_is_a_finding_and_the_others_are_made(cache, monkeypatch):
    def _torch():
        raise RuntimeError("first\nsecond")
        yield

    monkeypatch.setattr(module, "_torch", _torch)
    found = findings()
    assert found["torch"].status == "failed" and found["torch"].found == "cannot be checked: RuntimeError: first"
    assert "cache" in found


def test_neither_cuda_nor_tritons_driver_is_initialised():
    code = (
        "import sys, torch, triton\n"
        "from click.testing import CliRunner\n"
        "from smart_autotune.cli import main\n"
        "torch.cuda._lazy_init = torch._C._cuda_init = lambda *args: sys.exit('CUDA')\n"
        "result = CliRunner().invoke(main, ['doctor'])\n"
        "print(result.exit_code, triton.runtime.driver._active, torch.cuda.is_initialized(), result.exception)\n"
    )
    here = [path for path in sys.path if path]
    status, active_driver, initialised, _ = run_child([sys.executable, "-c", code], first=here).stdout.split(" ", 3)
    assert status in "01" and (active_driver, initialised) == ("None", "False")


def test_without_triton_it_still_runs_and_says_so():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from click.testing import CliRunner\n"
        "from smart_autotune.cli import main\n"
        "for arguments in (['doctor'], ['audit', 'x', '--arch', 'sm_90'], ['--help']):\n"
        "    result = CliRunner().invoke(main, arguments)\n"
        "    print(result.exit_code, result.output)\n"
    )
    here = [path for path in sys.path if path]
    text = run_child([sys.executable, "-c", code], first=here).stdout
    assert text.startswith("1 ") and "ModuleNotFoundError" in text
    assert "audit cannot be used here" in text and "Run COMMAND with every" in text


# ---- Triton and the tools --------------------------------------------------------------------------------------------


def test_a_triton_that_the_patch_is_not_for_fails_with_what_is_expected(monkeypatch):
    import triton

    monkeypatch.setattr(triton, "__version__", "3.9.0")
    found = findings()["Triton"]
    assert found.status == "failed" and "3.9.0" in found.found and "triton==3.6.0" in found.remedy


@on_the_verified_triton
def test_a_patch_of_somebody_else_fails_by_name(monkeypatch):
    from triton.runtime.autotuner import Autotuner

    monkeypatch.setattr(Autotuner, "run", lambda self, *args, **kwargs: None)
    found = findings()["Triton"]
    assert found.status == "failed" and __name__.rpartition(".")[2] in found.found


def test_the_interpreter_is_a_warning(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert findings()["TRITON_INTERPRET"].status == "warning"


@pytest.mark.parametrize(("version", "status"), [("2.11.0+cu130", "ok"), ("2.13.0", "warning"), (None, "failed")])
def test_torch_is_compared_with_the_tested_pair(monkeypatch, version, status):
    monkeypatch.setattr(module, "_version", lambda package: version)
    (found,) = module._torch()
    assert found.status == status


def test_an_assembler_that_does_not_run_fails(monkeypatch):
    import triton

    class Nvidia:
        @property
        def ptxas(self):
            raise RuntimeError("Cannot find ptxas")

        ptxas_blackwell = cuobjdump = type("Tool", (), {"version": "12.9", "path": "/x"})

    monkeypatch.setattr(triton.knobs, "nvidia", Nvidia())
    found = findings()
    assert found["ptxas"].status == "failed" and "Cannot find ptxas" in found["ptxas"].found
    assert found["ptxas-blackwell"].status == "ok"


# ---- settings --------------------------------------------------------------------------------------------------------


def test_settings_in_force_are_shown_as_they_are_understood():
    found = in_settings(SMART_AUTOTUNE_MODE="FIRST_FIT", SMART_AUTOTUNE_CACHE="off", HOME="/x")
    assert found["settings"].found == "SMART_AUTOTUNE_MODE=first_fit, SMART_AUTOTUNE_CACHE=False"
    assert in_settings()["settings"].found == "all at their defaults"


def test_every_bad_value_is_a_failure_of_its_own():
    found = in_settings(SMART_AUTOTUNE_MODE="tnue", SMART_AUTOTUNE_WAIT_SECS="-1")
    assert found["SMART_AUTOTUNE_MODE"].status == found["SMART_AUTOTUNE_WAIT_SECS"].status == "failed"
    assert "tune | first_fit" in found["SMART_AUTOTUNE_MODE"].remedy


def test_an_unknown_variable_is_a_warning_with_the_nearest_name():
    found = in_settings(SMART_AUTOTUNE_MOED="tune")["SMART_AUTOTUNE_MOED"]
    assert found.status == "warning" and "did you mean SMART_AUTOTUNE_MODE?" in found.remedy


@pytest.mark.parametrize(("text", "status"), [("1", "ok"), ("0", "note"), (None, "note"), ("maybe", "failed")])
def test_whether_the_shell_switches_us_on_is_said(monkeypatch, text, status):
    if text is None:
        monkeypatch.delenv("SMART_AUTOTUNE", raising=False)
    else:
        monkeypatch.setenv("SMART_AUTOTUNE", text)
    assert in_settings(**os.environ)["SMART_AUTOTUNE"].status == status


def test_a_bad_setting_does_not_end_the_other_checks(monkeypatch):
    monkeypatch.setenv("SMART_AUTOTUNE_MODE", "tnue")
    monkeypatch.setattr(settings, "_current", None)
    found = findings()
    assert found["SMART_AUTOTUNE_MODE"].status == found["cache"].status == "failed"
    assert found["C compiler"].status == "ok"


# ---- how a server's processes get us ---------------------------------------------------------------------------------

ASK = "import json\nfrom smart_autotune.cli.doctor import findings\nprint(json.dumps({f.check: [f.status, f.found, f.remedy] for f in findings()}))"  # noqa: E501  # fmt: skip


def test_the_wheels_pth_is_found_and_acts(installed, tmp_path):
    done = installed.run("-c", ASK, variables={"SMART_AUTOTUNE_CACHE_DIR": str(tmp_path), "SMART_AUTOTUNE_CACHE": "1"})
    status, found, _ = json.loads(done.stdout.splitlines()[-1])[".pth"]
    assert status == "ok" and "smart_autotune.pth: acts" in found


def test_without_a_pth_the_remedy_is_the_run_command(monkeypatch, tmp_path):
    monkeypatch.setattr(module.site, "getsitepackages", lambda: [str(tmp_path)])
    monkeypatch.setattr(module.site, "getusersitepackages", lambda: str(tmp_path))
    monkeypatch.setattr(module.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(module, "_pth_acts", lambda: False)
    (found,) = module._startup()
    assert found.status == "warning" and "smart-autotune run" in found.remedy
    (tmp_path / "smart_autotune.pth").write_text("")
    (found,) = module._startup()
    assert found.status == "failed" and "does not act" in found.found


def entry_points(*names):
    return lambda group: [importlib.metadata.EntryPoint(name, "smart_autotune.patches.startup:activate", group)
                          for name in names]  # fmt: skip


@pytest.mark.parametrize(
    ("registered", "listed", "status", "text"),
    [
        (["smart_autotune"], None, "ok", "sglang 0.5.17 loads smart_autotune.patches.startup:activate"),
        (["smart_autotune"], "a, smart_autotune", "ok", "loads"),
        (["smart_autotune"], "a,b", "warning", "SGLANG_PLUGINS=a,b"),
        (["smart_autotune"], "", "warning", "SGLANG_PLUGINS="),
        (["other"], None, "warning", "not registered"),
    ],
)
def test_a_server_that_is_installed_must_load_our_plug_in(monkeypatch, registered, listed, status, text):
    monkeypatch.setattr(module, "_version", lambda package: "0.5.17" if package == "sglang" else None)
    monkeypatch.setattr(importlib.metadata, "entry_points", entry_points(*registered))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if listed is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", listed)
    (found,) = module._plugins()
    assert found.status == status and text in found.found


# ---- files -----------------------------------------------------------------------------------------------------------


def test_the_cache_folder_is_not_made_by_looking_at_it(cache):
    assert findings()["cache"].status == "ok" and not cache.exists()


def test_entries_are_counted_and_those_that_cannot_be_read_are_a_warning(cache):
    path = kept.entry(cache)
    (path.parent / "bad-0123.json").write_text("{")
    before = sorted(cache.rglob("*"))
    found = findings()
    assert found["cache"].found == f"{cache}: writable, 1 entries"
    assert found["cache entries"].status == "warning" and "bad-0123.json" in found["cache entries"].found
    assert sorted(cache.rglob("*")) == before, "nothing is left behind"


@pytest.mark.parametrize("where", ["/proc/no/such", "{file}/below"])
def test_a_cache_that_cannot_be_written_fails(tmp_path, where):
    (tmp_path / "file").write_text("")
    with settings.override(cache=True, cache_dir=where.format(file=tmp_path / "file")):
        found = findings()["cache"]
    assert found.status == "failed" and "SMART_AUTOTUNE_CACHE_DIR" in found.remedy


def test_a_cache_that_is_off_is_a_warning():
    with settings.override(cache=False):
        assert findings()["cache"].status == "warning"


@pytest.mark.parametrize(
    ("path", "status"), [("{folder}/new/log", "ok"), ("{folder}", "ok"), ("/proc/no/log", "warning"), ("", None)]
)
def test_a_log_that_is_asked_for_must_be_writable(tmp_path, path, status):
    with settings.override(log=path.format(folder=tmp_path)):
        found = findings().get("log")
    assert (found.status if found else None) == status
    assert list(tmp_path.iterdir()) == []


# ---- the device ------------------------------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path, monkeypatch):
    def says(text, status=0):
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\nprintf '{text}'\nexit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return [finding for finding in module._device() if finding.check == "GPU"]

    return says


def test_the_gpu_and_its_cap_are_shown_without_asking_cuda(smi):
    (found,) = smi("NVIDIA RTX PRO 6000 Blackwell, 12.0\\nNVIDIA RTX PRO 6000 Blackwell, 12.0\\n")
    assert found.status == "ok"
    assert found.found == "2 x NVIDIA RTX PRO 6000 Blackwell (sm_120): 101,376 bytes of shared memory a block"


@pytest.mark.parametrize(
    ("text", "code", "status"), [("Some GPU, 99.9\\n", 0, "warning"), ("", 0, "note"), ("failed, 1\\n", 9, "note")]
)
def test_other_answers_of_the_drivers_tool_are_no_crash(smi, text, code, status):
    (found,) = smi(text, code)
    assert found.status == status


def test_the_gpu_itself_is_asked_only_by_the_flag():
    assert "GPU limits" not in findings()
    with active(StubDriver(120)):
        found = findings(gpu=True)["GPU limits"]
    assert found.status == "ok" and found.found.startswith("sm_120: 101,376 bytes a block")


def test_a_gpu_with_another_cap_than_audits_count_on_is_a_warning():
    with active(StubDriver(120, shared_bytes=65_536)):
        found = findings(gpu=True)["GPU limits"]
    assert found.status == "warning" and "audits for sm_120 count on 101,376 bytes" in found.remedy


def test_a_lowered_cap_is_a_warning():
    with active(StubDriver(90)), settings.override(shared_bytes_cap=101_376):
        assert "SMART_AUTOTUNE_SHARED_BYTES_CAP" in findings(gpu=True)["GPU limits"].remedy
