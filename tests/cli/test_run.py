"""``smart-autotune run -- COMMAND``: what the command's environment is, and that it is the command that runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from smart_autotune.cli import main
from smart_autotune.cli.run import environment_for
from support.installed import TESTS, run_child
from support.patching import on_the_verified_triton

COMMAND = [sys.executable, "-m", "smart_autotune.cli", "run"]
ASK = "from triton.runtime.autotuner import Autotuner; print(getattr(Autotuner.run, '_smart_autotune_patch', 'stock'))"


def site_folder():
    import smart_autotune.patches

    return str(Path(smart_autotune.patches.__file__).parent / "site")


def ran(*arguments, check=True, **options):
    """Packages are found as this process finds them, whether installed or not."""
    here = [path for path in sys.path if path and path != str(TESTS)]
    options["first"] = [*options.get("first", ()), *here]
    return run_child([*COMMAND, *arguments], check=check, **options)


# ---- the environment -------------------------------------------------------------------------------------------------


def test_the_variable_is_set_and_our_folder_leads_the_path():
    found = environment_for({"HOME": "/home/me", "PYTHONPATH": "/a:/b"})
    assert found == {
        "HOME": "/home/me", "SMART_AUTOTUNE": "1", "PYTHONPATH": os.pathsep.join([site_folder(), "/a", "/b"]),
    }  # fmt: skip


@pytest.mark.parametrize("path", [None, "", ":"])
def test_without_a_path_ours_is_the_path_and_the_current_folder_does_not_join_it(path):
    environ = {} if path is None else {"PYTHONPATH": path}
    assert environment_for(environ)["PYTHONPATH"] == site_folder()


def test_a_run_inside_a_run_changes_nothing():
    once = environment_for({"PYTHONPATH": "/a"})
    assert environment_for(once) == once


def test_switched_off_by_the_variable_it_is_switched_on():
    assert environment_for({"SMART_AUTOTUNE": "0"})["SMART_AUTOTUNE"] == "1"


def test_the_callers_own_environment_is_not_touched():
    environ = {"PYTHONPATH": "/a"}
    environment_for(environ)
    assert environ == {"PYTHONPATH": "/a"}


def test_the_folder_holds_one_module():
    assert [path.name for path in Path(site_folder()).glob("*.py")] == ["sitecustomize.py"]


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_commands_own_options_output_and_exit_status_are_the_commands():
    code = "import sys; print(sys.argv[1:]); print('to stderr', file=sys.stderr); sys.exit(7)"
    done = ran("--", sys.executable, "-c", code, "--help", "-x", "--", "--mode=fast", check=False)
    assert (done.returncode, done.stderr) == (7, "to stderr\n")
    assert done.stdout == "['--help', '-x', '--', '--mode=fast']\n"


def test_the_two_dashes_may_be_left_out():
    assert ran(sys.executable, "-c", "import sys; print(sys.argv[1:])", "--help").stdout == "['--help']\n"


@on_the_verified_triton
def test_the_command_is_patched():
    assert ran("--", sys.executable, "-c", ASK).stdout == "triton-3.6.0\n"


@on_the_verified_triton
def test_a_shell_in_between_passes_it_on():
    done = ran("--", "sh", "-c", f'"{sys.executable}" -c "{ASK}"')
    assert done.stdout == "triton-3.6.0\n"


@on_the_verified_triton
def test_a_sitecustomize_that_ours_hides_runs_first(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; print('theirs', 'smart_autotune' in sys.modules)\n")
    done = ran(
        "--", sys.executable, "-c", f"import sitecustomize; print(sitecustomize.__file__)\n{ASK}", first=[tmp_path]
    )
    mine, *commands = done.stdout.splitlines()
    assert mine == "theirs False", "of the process that is `run` itself"
    assert commands == ["theirs False", str(tmp_path / "sitecustomize.py"), "triton-3.6.0"]


@on_the_verified_triton
def test_a_sitecustomize_that_fails_is_reported_by_python_and_the_command_is_patched_all_the_same(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("raise KeyError('theirs')\n")
    done = ran("--", sys.executable, "-c", ASK, first=[tmp_path])
    assert done.stdout == "triton-3.6.0\n"
    assert "KeyError: 'theirs'" in done.stderr


def test_an_unknown_command_is_refused_by_name():
    result = CliRunner().invoke(main, ["run", "--", "no-such-command-here"])
    assert result.exit_code == 2
    assert "no such command: no-such-command-here" in result.output


def test_no_command_is_refused():
    result = CliRunner().invoke(main, ["run"])
    assert result.exit_code == 2
    assert "COMMAND" in result.output


def test_a_file_that_cannot_be_executed_is_an_error_of_one_line(tmp_path):
    program = tmp_path / "program"
    program.write_bytes(b"\x00 not a program")
    program.chmod(0o755)
    done = ran("--", str(program), check=False)
    assert done.returncode == 1
    assert done.stderr == f"Error: {program}: Exec format error\n"
