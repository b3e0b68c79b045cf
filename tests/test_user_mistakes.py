"""What users can get wrong beside the input file: exit code 2 and one line that names it, no trace, soon."""

import json
import os
import random
import subprocess
import sys

import h5py
import numpy as np
import pytest

from kda_engine import threads
from kda_engine.hdf5.results import ResultFile
from mpi_runner import launched, sizes
from mpi_runner.__main__ import COMMANDS, main, parser
from mpi_runner.exit_codes import GOLDEN, MISMATCH, NOTHING_COMPARED, PASS, USAGE
from mpi_runner.messages import one_line


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with an input, a symlink loop, and TOML files that cannot be used."""
    monkeypatch.chdir(tmp_path)
    assert main(["input", "--case", "tokens-1", "in.h5"]) == 0
    os.symlink("loop", "loop")
    os.mkfifo("fifo")
    for name, text in {"digits": f"tolerance = {'9' * 400}", "scale": f"scale = {'9' * 400}",
                       "timeout": f"exchange-timeout = -{'9' * 400}", "longer": f"tolerance = {'9' * 5000}",
                       "nested": f"engine = {'[' * 5000}{']' * 5000}", "list": f"engine = [{'1, ' * 100000}]",
                       "lines": 'engine = """a\nb"""'}.items():
        (tmp_path / f"{name}.toml").write_text(text + "\n")
    return tmp_path


def refused(capsys, *arguments):
    """The one line about a mistake."""
    capsys.readouterr()
    try:
        code = main([str(x) for x in arguments])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    assert code == USAGE and out == "", err
    lines = [line for line in err.splitlines() if not line.startswith(("usage:", "hint:", "  "))]
    assert len(lines) == 1 and len(lines[0]) < 5000, err
    return lines[0]


@pytest.mark.parametrize("arguments, words", [
    ("run loop out.h5", ("loop", "symbolic links")), ("run in.h5 loop", ("loop", "symbolic links")),
    ("run in.h5 loop/x.h5", ("loop", "symbolic links")), ("run in.h5 out.h5 --config loop", ("loop", "symbolic links")),
    ("run in.h5 /proc/x.h5", ("/proc/x.h5", "folder to write to")), ("input --case packed /proc/x.h5", ("/proc/x.h5",)),
    ("run in.h5 out.h5 --config digits.toml", ("tolerance", "400 digits")),
    ("run in.h5 out.h5 --config timeout.toml", ("exchange_timeout", "400 digits")),
    ("run in.h5 out.h5 --config longer.toml", ("longer.toml", "digits")),
    ("run in.h5 out.h5 --config scale.toml", ("scale", "float64")),
    ("run in.h5 out.h5 --config nested.toml", ("nested.toml", "nested too deep")),
    ("run in.h5 out.h5 --config list.toml", ("engine", "expected str", "characters")),
    ("run in.h5 out.h5 --config lines.toml", ("engine", "expected one of")),
    ("run in.h5 out.h5 --config fifo", ("config", "a fifo")), ("run in.h5 out.h5 --config .", ("config", "a folder")),
    ("plan in.h5 --ranks-per-node 10000000000", ("ranks_per_node", "at most")),
    ("input --case packed --tokens 2147483648 out.h5", ("sizes", "memory")),
    ("input --case packed --sequences 1000000000 out.h5", ("sequences", "at most")),
    ("input --case packed --heads 10000000000 out.h5", ("heads", "at most")),
    ("input --from-text fifo out.h5", ("fifo", "a fifo")), ("input --from-text /dev/zero out.h5", ("/dev/zero", "device")),
    ("input --from-text in.h5 --heads 60000 --K 60000 out.h5", ("sizes", "memory")),
    ("plan --tokens 9223372036854775808", ("tokens", "at most")), ("plan --tokens 1e9", ("--tokens", "as 8192, 64K or 1M")),
    ("plan --ranks 1000000000", ("ranks", "at most")), ("plan --heads 9223372036854775807", ("heads", "at most")),
    ("plan --heads 60000 --ranks 60000", ("ranks", "fewer")), ("plan --sequences 1000000000", ("sequences", "at most")),
    ("plan --forward-rate nan --bandwidth 1", ("forward-rate", "finite")),
])
def test_mistakes(folder, arguments, words, capsys):
    line = refused(capsys, *arguments.split())
    assert all(word in line for word in words), line
    assert not (folder / "out.h5").exists()


def test_a_working_folder_that_is_gone(tmp_path):
    """As another process: nothing of this one may lie there."""
    script = ("import os, sys; folder = sys.argv[1]; os.mkdir(folder); os.chdir(folder); os.rmdir(folder)\n"
              "from mpi_runner.__main__ import main; sys.exit(main(['plan']))")
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "gone")], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": root}, timeout=60)
    assert done.returncode == USAGE and done.stderr.startswith("kda-engine: error: working folder: expected one that exists")


@pytest.mark.parametrize("said, number", [
    ("4,2", 4), (" 1", 1), (" 07 , 3", 7), ("99999999999999999999", threads.MOST_THREADS), ("²", None), ("٣", None),
    ("", None), ("0", None), ("-2", None), ("2x", None), ("x,2", None),
])
def test_thread_counts(said, number, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", said)
    assert threads.threads_asked_for() == number


def test_digits_of_other_scripts_are_no_rank(monkeypatch):
    for name in launched.RANK_VARIABLES:
        monkeypatch.setenv(name, "²")
    assert launched.launched_rank() == 0 and not launched.launched()


@pytest.mark.parametrize("text, number", [("8192", 8192), ("64K", 65536), ("1M", 1 << 20), ("2g", 2 << 30), ("-1", -1)])
def test_sizes_with_units(text, number):
    assert sizes.whole_number(text) == number


def test_a_message_is_one_line_of_sane_length():
    assert one_line("a\nb\x1b[0m") == "a b\\x1b[0m"
    assert len(one_line("x" * 5_000_000)) < 5000


def test_memory_that_is_not_there(monkeypatch, capsys):
    """Where no check knew the size beforehand."""
    def greedy(*given, **named):
        raise MemoryError("Unable to allocate 8. EiB")

    monkeypatch.setattr("mpi_runner.commands.plan.make_plan", greedy)
    assert "8. EiB" in refused(capsys, "plan")


# Values that each option of a fuzzed line is drawn from: right, wrong, odd.
VALUES = ("0", "1", "2", "3", "-1", "64", "1M", "1e3", "nan", "inf", "-inf", "1e400", "9" * 30, "²", "", " ", "a\nb", "\udcff",
          "in.h5", "no.h5", "loop", "fifo", "/proc/x", "/dev/null", ".", "digits.toml", "nested.toml", "numpy", "reference",
          "serial", "log", "softplus", "KV", "VK", "certified", "float64", "bfloat16", "packed", "tokens-1", "shards", "x" * 5000)
# `bench` measures for its time, `info` asks processes, `golden` computes: their parsers are fuzzed, they are not run.
RUN = ("run", "input", "compare", "plan")
CODES = {PASS, MISMATCH, USAGE, GOLDEN, NOTHING_COMPARED}


def options_of(top, command):
    below = next(action for action in top._actions if hasattr(action, "choices") and action.choices
                 and command in action.choices).choices[command]
    return [(name, action.nargs == 0) for action in below._actions for name in action.option_strings
            if name not in ("-h", "--help", "--plot")]


def lines(top, seed, count):
    """So many seeded command lines."""
    draw = random.Random(seed)
    for _ in range(count):
        command = draw.choice(COMMANDS)
        line = [command]
        for name, alone in draw.sample(options := options_of(top, command), min(len(options), draw.randrange(5))):
            line += [name] if alone else [name, draw.choice(VALUES)]
        line += draw.choices(VALUES, k=draw.randrange(4))
        if draw.random() < 0.2:
            draw.shuffle(line)
        yield line


@pytest.mark.parametrize("seed", range(3))
def test_fuzzed_command_lines(folder, seed, capsys, monkeypatch):
    """Any words at all end in a documented code, without a trace, and lines stay readable."""
    # Made once: its making takes longer than its use.
    made = parser()
    monkeypatch.setattr("mpi_runner.__main__.parser", lambda: made)
    for line in lines(made, seed, 500):
        try:
            args = made.parse_args(line)
        except SystemExit as stop:
            assert stop.code in (PASS, USAGE), line
        else:
            if args.command == "run":
                check_job(args)
            elif args.command in RUN:
                assert main(line) in CODES, line
        out, err = capsys.readouterr()
        assert "Traceback" not in err, (line, err)
        assert all(len(text) < 6000 for text in err.splitlines()), line


def check_job(args):
    """What follows of `run` is MPI's and tested elsewhere."""
    from kda_engine.errors import InputError
    from mpi_runner.job import Job

    given = {name: value for name, value in vars(args).items() if name not in ("run", "command", "config")}
    try:
        Job.resolve(given, getattr(args, "config", None))
    except InputError:
        pass


@pytest.mark.parametrize("variable", ("SLURM_STEP_NUM_TASKS", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE"))
def test_ranks_that_mpi_does_not_know(folder, variable):
    """As under srun with another start-up protocol than the MPI library's: every task is rank 0 of 1."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "PYTHONPATH": root, "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", variable: "4"}
    done = subprocess.run([sys.executable, "-m", "mpi_runner", "run", "in.h5", "out.h5"], capture_output=True, text=True,
                          env=environment, timeout=60)
    # mpi4py itself warns of one of the variables.
    told = [line for line in done.stderr.splitlines() if line.startswith("kda-engine: error:")]
    assert done.returncode == USAGE and len(told) == 1 and "Traceback" not in done.stderr, done.stderr
    assert "--mpi=pmix" in told[0] and variable in told[0] and not (folder / "out.h5").exists()


@pytest.mark.parametrize("options, code", [([], PASS), (["--require-finite"], MISMATCH)])
def test_results_that_are_not_finite(folder, options, code):
    with h5py.File("in.h5", "r+") as file:
        file["inputs/v"][0, 1, 2] = np.nan
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run([sys.executable, "-m", "mpi_runner", "run", "in.h5", "out.h5", "--json", *options],
                          capture_output=True, text=True, env={**os.environ, "PYTHONPATH": root}, timeout=60)
    assert done.returncode == code, done.stderr
    report = json.loads(done.stdout)
    assert report["output"] == "out.h5"
    assert report["not_finite"]["outputs/out"]["first"] == {"sequence": 0, "head": 1, "token": 0}
    with ResultFile("out.h5") as result:
        assert "outputs/out" in result.tensors()
