"""How a process turns itself on: real children, from a wheel in a fresh environment."""

from __future__ import annotations

import logging
import os
import stat
import sys
import textwrap
from types import ModuleType, SimpleNamespace

import pytest
import triton

from smart_autotune import settings
from smart_autotune.patches import startup
from support.installed import Environment, run_child
from support.patching import on_the_verified_triton

pytestmark = on_the_verified_triton
ON = {"SMART_AUTOTUNE": "1"}
MARK = "print(getattr(Autotuner.run, '_smart_autotune_patch', 'stock'), flush=True)"
ASK = f"from triton.runtime.autotuner import Autotuner; {MARK}"
OURS, STOCK = "triton-3.6.0", "stock"
GROUPS = {"sglang.srt.plugins": "activate_in_sglang", "vllm.general_plugins": "activate"}
LOAD = """
from importlib.metadata import entry_points
for group in ("sglang.srt.plugins", "vllm.general_plugins"):
    for entry in entry_points(group=group):
        entry.load()()
"""


@pytest.fixture(scope="module")
def without_pth(tmp_path_factory, wheel):
    """An environment where only the servers' entry points and ``run`` reach: the ``.pth`` is not there."""
    environment = Environment(tmp_path_factory.mktemp("without") / "venv").install(wheel).see_dependencies()
    (environment.packages / "smart_autotune.pth").unlink()
    return environment


def printed(environment, code, variables=ON, **options):
    """What ``code`` prints in a child of ``environment``, and what it says to stderr."""
    done = environment.run("-c", textwrap.dedent(code), variables=variables, **options)
    return done.stdout.split("\n")[:-1], done.stderr


# ---- the .pth --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variables", [{}, {"SMART_AUTOTUNE": ""}], ids=["unset", "empty"])
def test_unset_nothing_of_ours_is_imported_and_stock_stays(installed, variables):
    code = f"""
        import sys
        early = sorted(name for name in sys.modules if name.startswith(("smart_autotune", "wrapt", "triton", "torch")))
        print(early)
        {ASK}
        print(sorted(name for name in sys.modules if name.startswith(("smart_autotune", "wrapt"))))
    """
    assert printed(installed, code, variables) == (["[]", STOCK, "[]"], "")


def test_set_the_patch_waits_for_triton_and_imports_neither_it_nor_torch(installed):
    code = f"""
        import sys
        print(sorted({{name.partition(".")[0] for name in sys.modules}} & {{"smart_autotune", "triton", "torch"}}))
        import triton
        {ASK}
        print("torch" in sys.modules)
    """
    assert printed(installed, code) == (["['smart_autotune']", OURS, "False"], "")


def test_set_to_0_stock_stays(installed):
    assert printed(installed, ASK, {"SMART_AUTOTUNE": "0"}) == ([STOCK], "")


def test_isolated_mode_which_ignores_pythonpath_and_the_users_site_is_reached(installed):
    done = installed.run("-I", "-c", ASK, variables=ON)
    assert (done.stdout.strip(), done.stderr) == (OURS, "")


def test_the_line_costs_an_unset_process_next_to_nothing(installed, record_property):
    line = (installed.packages / "smart_autotune.pth").read_text(encoding="utf-8")
    assert line.count("\n") == 1 and line.startswith("import "), "site runs lines that begin so, one by one"
    (secs, loaded), _ = printed(
        installed, f"import sys, timeit; print(timeit.timeit({line!r}, number=1000)); print('wrapt' in sys.modules)", {}
    )
    record_property("unset_cost_us", round(float(secs) * 1e3, 3))  # information, not a limit: machines differ
    assert loaded == "False"


# ---- entry points, run, all at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("group", GROUPS)
def test_the_wheel_names_one_entry_point_for_each_server(installed, group):
    code = f"""
        from importlib.metadata import entry_points
        print([(entry.name, entry.value) for entry in entry_points(group={group!r})])
    """
    assert printed(installed, code, {})[0] == [
        f"[('smart_autotune', 'smart_autotune.patches.startup:{GROUPS[group]}')]"
    ]


def test_an_entry_point_applies_the_patch_at_once_where_triton_is_there(without_pth):
    assert printed(without_pth, f"{ASK}\n{LOAD}\n{MARK}") == ([STOCK, OURS], "")


def test_an_entry_point_that_is_loaded_first_waits_for_triton(without_pth):
    assert printed(without_pth, f"{LOAD}\nimport sys; print('triton' in sys.modules)\n{ASK}") == (["False", OURS], "")


def test_an_entry_point_is_inert_when_unset(without_pth):
    code = f"{LOAD}\nimport sys; print([name in sys.modules for name in ('triton', 'wrapt', 'torch')])\n{ASK}"
    assert printed(without_pth, code, {}) == (["[False, False, False]", STOCK], "")


def under_run(environment, *command, **options):
    return environment.run("-m", "smart_autotune.cli", "run", "--", *command, **options)


def test_run_reaches_a_command_and_its_children_where_the_pth_does_not(without_pth):
    python = str(without_pth.python)
    code = f"import subprocess, sys\n{ASK}\nsubprocess.run([sys.executable, '-c', {ASK!r}], check=True)"
    done = under_run(without_pth, python, "-c", code)
    assert (done.stdout.split(), done.stderr) == ([OURS, OURS], "")


def test_all_three_at_once_are_the_same_as_one(installed):
    code = f"""
import logging
logging.basicConfig(level=logging.INFO, format="%(message)s")
{ASK}
{LOAD}
from smart_autotune.patches.startup import activate
activate()
import smart_autotune
smart_autotune.enable()
{MARK}
print(hasattr(Autotuner.run.__wrapped__, "_smart_autotune_patch"))
smart_autotune.disable()
{MARK}
"""
    done = under_run(installed, str(installed.python), "-c", code, variables=ON)
    assert done.stdout.split() == [OURS, OURS, "False", STOCK]
    assert done.stderr.splitlines() == ["triton-3.6.0 applied: triton.autotune kernels are tuned by smart_autotune"]


# ---- processes that processes start ----------------------------------------------------------------------------------

CHILDREN = f"""
import multiprocessing, subprocess, sys

def ask():
    {ASK}

if __name__ == "__main__":
    way = sys.argv[1]
    if len(sys.argv) > 2:
        multiprocessing.set_executable(sys.argv[2])  # as SGLang does to put numactl before python
    ask()
    if way == "subprocess":
        subprocess.run([sys.argv[2] if len(sys.argv) > 2 else sys.executable, "-c", {ASK!r}], check=True)
    else:
        child = multiprocessing.get_context(way).Process(target=ask)
        child.start()
        child.join()
        sys.exit(child.exitcode)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "children.py"
    path.write_text(CHILDREN, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("way", ["spawn", "fork", "forkserver", "subprocess"])
def test_children_are_patched_like_their_parent(installed, script, way):
    done = installed.run(script, way, variables=ON)
    assert (done.stdout.split(), done.stderr) == ([OURS, OURS], "")


@pytest.mark.parametrize("way", ["spawn", "subprocess"])
def test_children_behind_a_wrapper_like_numactl_are_patched(installed, script, tmp_path, way):
    wrapper = tmp_path / "numactl"
    wrapper.write_text(f'#!/bin/sh\nexport THROUGH_WRAPPER=1\nexec "{installed.python}" "$@"\n', encoding="utf-8")
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    done = installed.run(script, way, str(wrapper), variables=ON)
    assert (done.stdout.split(), done.stderr) == ([OURS, OURS], "")


@pytest.fixture(scope="module")
def inner(installed, tmp_path_factory):
    """An environment made by another one's interpreter; it sees the other's packages, ``.pth`` files included."""
    folder = tmp_path_factory.mktemp("inner") / "venv"
    run_child([str(installed.python), "-m", "venv", "--without-pip", "--system-site-packages", str(folder)])
    environment = object.__new__(Environment)
    environment.python = folder / "bin" / "python"
    environment.packages = folder / installed.packages.relative_to(installed.packages.parents[2])
    (environment.packages / "outer.pth").write_text(f"import site; site.addsitedir({str(installed.packages)!r})\n")
    return environment


def test_an_environment_inside_another_is_reached(inner):
    assert printed(inner, ASK) == ([OURS], "")
    assert printed(inner, ASK, {}) == ([STOCK], "")


def test_two_copies_of_the_wheel_on_one_path_are_the_same_as_one(inner, wheel, tmp_path):
    twice = Environment(tmp_path / "venv").install(wheel)
    (twice.packages / "outer.pth").write_text((inner.packages / "outer.pth").read_text())
    assert printed(twice, ASK) == ([OURS], "")
    _, complaint = printed(twice, ASK, {"SMART_AUTOTUNE": "maybe"})
    assert complaint.count("SMART_AUTOTUNE='maybe'") == 1


def test_run_leaves_a_python_alone_that_does_not_have_us(without_pth, tmp_path):
    stranger = Environment(tmp_path / "venv").see_dependencies()
    # What is installed beside us for these tests may be us, from this checkout: not to be found there.
    code = "import importlib.util as u, sys; sys.exit(0 if u.find_spec('smart_autotune') is None else 3)"
    if stranger.run("-c", code, check=False).returncode:
        pytest.skip("smart_autotune is installed beside torch here")
    done = under_run(without_pth, str(stranger.python), "-c", ASK)
    assert (done.stdout.split(), done.stderr) == ([STOCK], "")


# ---- what goes wrong -------------------------------------------------------------------------------------------------

NOT_ON = "smart_autotune is not turned on: "


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({"SMART_AUTOTUNE": "maybe"}, "SettingsError: SMART_AUTOTUNE='maybe' is not allowed: expected 1 or 0"),
        (
            {**ON, "SMART_AUTOTUNE_MODE": "tnue"},
            "SettingsError: SMART_AUTOTUNE_MODE='tnue' is not allowed: expected tune | first_fit | pinned | off | "
            "stock",
        ),
    ],
    ids=["its own", "another's"],
)
def test_a_bad_value_leaves_stock_with_one_warning_however_often_we_are_asked(installed, variables, complaint):
    variables = {**variables, "SMART_AUTOTUNE_STRICT": "0"}
    assert printed(installed, f"{ASK}\n{LOAD}\n{MARK}", variables) == ([STOCK, STOCK], f"{NOT_ON}{complaint}\n")


def test_a_bad_value_is_an_error_when_strict(installed, without_pth):
    bad = {"SMART_AUTOTUNE": "maybe", "SMART_AUTOTUNE_STRICT": "1"}
    at_start = installed.run("-c", ASK, variables=bad)
    assert at_start.stdout.strip() == STOCK, "Python reports what a .pth raises, and goes on"
    assert "smart_autotune.pth" in at_start.stderr and "SMART_AUTOTUNE='maybe' is not allowed" in at_start.stderr
    in_a_server = without_pth.run("-c", LOAD, variables=bad, check=False)
    assert in_a_server.returncode == 1
    assert "SMART_AUTOTUNE='maybe' is not allowed" in in_a_server.stderr


@pytest.fixture
def no_wrapt(tmp_path):
    (tmp_path / "wrapt.py").write_text("raise ImportError('no wrapt here')\n")
    return [tmp_path]


def test_without_wrapt_stock_stays_with_one_warning(installed, no_wrapt):
    assert printed(installed, ASK, first=no_wrapt) == ([STOCK], f"{NOT_ON}ImportError: no wrapt here\n")


def test_without_wrapt_a_server_is_still_patched_by_its_entry_point_once_triton_is_there(installed, no_wrapt):
    assert printed(installed, f"{ASK}\n{LOAD}\n{MARK}", first=no_wrapt)[0] == [STOCK, OURS]


def test_without_wrapt_it_is_an_error_when_strict(installed, no_wrapt):
    code = "from smart_autotune.patches.startup import activate; activate()"
    done = installed.run("-c", code, variables={**ON, "SMART_AUTOTUNE_STRICT": "1"}, first=no_wrapt, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("ImportError: no wrapt here\n")


TRITON_THAT_ASKS = """
__version__ = "3.6.0"
from smart_autotune.patches.startup import activate
activate()  # a package that Triton itself imports may do so
"""


def test_in_the_middle_of_tritons_own_import_nothing_is_done_and_one_line_says_so(without_pth, tmp_path):
    (tmp_path / "triton.py").write_text(TRITON_THAT_ASKS)
    code = """
        import triton, sys
        print("smart_autotune.patches.switch" in sys.modules)
    """
    out, complaint = printed(without_pth, code, first=[tmp_path])
    assert out == ["False"], "enable() was not tried"
    assert complaint.startswith(f"{NOT_ON}RuntimeError: Triton is being imported") and complaint.count("\n") == 1


SLOW_TRITON = """
import builtins
builtins.entered.set()
builtins.go_on.wait(60)
complete = True
"""


def test_another_threads_import_of_triton_is_waited_for(without_pth, tmp_path):
    (tmp_path / "triton.py").write_text(SLOW_TRITON)
    code = """
        import builtins, threading, sys
        builtins.entered, builtins.go_on = threading.Event(), threading.Event()
        from smart_autotune.patches import startup, switch
        switch.enable = lambda: print("complete" if hasattr(sys.modules["triton"], "complete") else "half")
        threading.Thread(target=__import__, args=("triton",)).start()
        entered.wait(60)
        asking = threading.Thread(target=startup.activate)
        asking.start()
        asking.join(0.2)
        go_on.set()
        asking.join(60)
    """
    assert printed(without_pth, code, first=[tmp_path]) == (["complete"], "")


# ---- in this process -------------------------------------------------------------------------------------------------


@pytest.fixture
def not_yet_asked(monkeypatch):
    """Nobody has asked this process yet; it is asked now, and not strict."""
    monkeypatch.setattr(startup, "_registered", False)
    monkeypatch.setattr(startup, "_said", set())
    monkeypatch.setenv("SMART_AUTOTUNE", "1")
    monkeypatch.delenv("SMART_AUTOTUNE_STRICT", raising=False)
    return monkeypatch


def marked():
    return hasattr(triton.runtime.autotuner.Autotuner.run, "_smart_autotune_patch")


def test_where_triton_is_there_activate_applies_the_patch(not_yet_asked):
    startup.activate()
    assert marked()


def test_unset_activate_does_nothing(not_yet_asked):
    not_yet_asked.delenv("SMART_AUTOTUNE")
    startup.activate()
    assert not marked()


def test_after_disable_asking_again_does_not_turn_it_on(not_yet_asked):
    import smart_autotune

    startup.activate()
    smart_autotune.disable()
    startup.activate()
    assert not marked(), "the operator's word, said later, counts"


@pytest.mark.parametrize("strict", [False, True])
def test_what_enable_does_not_expect_is_one_warning_or_an_error_when_strict(not_yet_asked, caplog, strict):
    from smart_autotune.patches import triton_3_6_0

    not_yet_asked.setenv("SMART_AUTOTUNE_STRICT", str(int(strict)))
    not_yet_asked.setattr(triton_3_6_0, "apply", lambda: {}["gone"])
    with settings.override(strict=strict):
        if strict:
            with pytest.raises(KeyError):
                startup.activate()
        else:
            startup.activate()
            startup.activate()
            (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
            assert record.getMessage() == f"{NOT_ON}KeyError: 'gone'"


def test_a_half_imported_triton_is_known_by_its_spec():
    module = ModuleType("triton")
    module.__spec__ = SimpleNamespace(_initializing=True)
    assert startup._is_half_imported(module)
    assert not startup._is_half_imported(ModuleType("triton"))
    assert not startup._is_half_imported(sys.modules["triton"])


def test_nothing_here_depends_on_the_folder_it_is_run_from(installed, tmp_path):
    assert os.listdir(tmp_path) == []
    assert printed(installed, ASK, cwd=tmp_path) == ([OURS], "")
