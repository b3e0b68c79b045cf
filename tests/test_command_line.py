"""The command line as a whole: version, hints, completion, colour."""

import argparse
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kda_engine.version import VERSION
from mpi_runner import colour, launched
from mpi_runner.__main__ import COMMANDS, main, parser
from mpi_runner.exit_codes import INTERNAL

ROOT = Path(__file__).resolve().parent.parent


def refused(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"kda-engine {VERSION}\n"


@pytest.mark.parametrize("arguments, meant", [
    (["golden", "chek"], "check"), (["goldne"], "golden"), (["golden", "check", "--engine", "numy"], "numpy"),
    (["run", "in.h5", "out.h5", "--bakward"], "--backward"), (["plan", "--rnks=3"], "--ranks"),
])
def test_a_mistyped_word_gets_the_nearest_one(arguments, meant, capsys):
    *_, error, hint = refused(capsys, *arguments)
    assert "error:" in error and hint == f"hint: did you mean {meant}?"


def test_an_option_of_other_commands_is_not_suggested_as_it_was_typed(capsys):
    hint = refused(capsys, "run", "in.h5", "out.h5", "--K", "3")[-1]
    assert hint == ("hint: --K is an option of kda-engine input, kda-engine golden new, "
                    "kda-engine golden suite, kda-engine plan")


def options_with_values(command):
    """(name of the command, action) for every option that takes a value, of a parser and all below it."""
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options_with_values(below)
        elif action.option_strings and action.nargs != 0:
            yield command.prog, action


def test_every_option_says_what_it_is_without():
    """Its default or what stands for it, in brackets, and its choices unless argparse lists them."""
    found = list(options_with_values(parser()))
    assert len(found) > 80
    for command, action in found:
        name = f"{command} {action.option_strings[0]}"
        assert action.help and re.search(r"\([^)]+\)", action.help), f"{name}: no default in its help"
        # A list of its own leaves out what is reserved.
        assert not action.choices or (action.metavar or "{").startswith("{"), f"{name}: choices hidden by a metavar"


@pytest.mark.parametrize("arguments", [["run", "in.h5"], ["golden"], ["plan", "--qqqqqqqq"]])
def test_other_mistakes_are_told_where_to_look(arguments, capsys):
    assert refused(capsys, *arguments)[-1].endswith("--help tells what it takes")


def test_only_the_first_rank_complains(monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "1")
    assert refused(capsys, "runn") == []


def completions(*words):
    script = (f'eval "$({sys.executable} -m mpi_runner completion bash)"\n'
              f'COMP_WORDS=(kda-engine {" ".join(words)})\nCOMP_CWORD={len(words)}\n'
              '$(complete -p kda-engine | grep -o "_shtab[a-z_]*")\nprintf "%s\\n" "${COMPREPLY[@]}"')
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_bash_completes_commands_options_and_values():
    assert set(completions("''")) >= set(COMMANDS)
    assert completions("golden", "ch") == ["check"]
    assert completions("run", "--engine", "nu") == ["numpy"]
    assert "--backward" in completions("run", "--ba")


def test_zsh_gets_a_script_of_its_own(capsys):
    assert main(["completion", "zsh"]) == 0
    script = capsys.readouterr().out
    assert script.startswith("#compdef kda-engine") and "--oversubscribe" in script


def test_colour_on_terminals_only(monkeypatch):
    class Terminal:
        isatty = staticmethod(lambda: True)

    assert colour.paint("ok", "green") == "ok"
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stdout", Terminal())
    assert colour.paint("ok", "green") == "\033[32mok\033[0m" and colour.paint("", None) == ""
    monkeypatch.setenv("NO_COLOR", "1")
    assert colour.paint("ok", "green") == "ok"
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    assert colour.paint("ok", "green") == "ok"


def test_a_check_on_a_terminal_is_coloured():
    command = [sys.executable, "-m", "mpi_runner", "golden", "check", "--engine", "numpy", "data/one-token.h5"]
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    ours, theirs = pty.openpty()
    done = subprocess.run(command, stdout=theirs, cwd=ROOT, env=environment, timeout=60)
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0 and "\033[32mok\033[0m" in shown
    assert "\033" not in subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment).stdout


@pytest.mark.parametrize("environment, rank, started", [
    ({}, 0, False), ({"PMI_RANK": "3"}, 3, True), ({"OMPI_COMM_WORLD_RANK": "0"}, 0, True),
    # A Slurm batch script is rank 0 of nothing, srun's tasks are ranks of a step.
    ({"SLURM_PROCID": "0"}, 0, False), ({"SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}, 2, True),
])
def test_what_the_environment_says_of_the_launcher(environment, rank, started, monkeypatch):
    for name in (*launched.RANK_VARIABLES, "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (launched.launched_rank(), launched.launched()) == (rank, started)


def test_a_failure_is_no_mismatch(monkeypatch, capsys):
    """Whatever goes wrong in a command is told with a trace and the internal error's code."""
    monkeypatch.setattr("mpi_runner.environment.describe", lambda: 1 / 0)
    assert main(["info"]) == INTERNAL
    assert "ZeroDivisionError" in capsys.readouterr().err
