"""Input that cannot be used: exit code 2, a message that names file, dataset and expectation, nothing written."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from launcher import launch, memory_folder
from mpi.all_cases import write_case

from kda_engine import cases
from kda_engine.engines.host import HostEngine
from kda_engine.errors import InputError
from kda_engine.hdf5.inputs import InputFile
from kda_engine.hdf5.results import ResultFile
from mpi_runner.__main__ import main
from mpi_runner.exit_codes import PASS, USAGE
from mpi_runner.lifetime import seconds_since_start
from mpi_runner.parallel.problem import RankProblem


def replace(file, name, array):
    del file[f"inputs/{name}"]
    file[f"inputs/{name}"] = array


def edit(change):
    def apply(path):
        with h5py.File(path, "r+") as file:
            change(file)

    return apply


def truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def set_at(name, index, value):
    def change(file):
        data = file[f"inputs/{name}"][()]
        data[index] = value
        file[f"inputs/{name}"][...] = data

    return edit(change)


def enormous(name, shape, dtype="f4", stored=True):
    """A dataset in the place of `name` that is far larger than its file; stored: as values that all read as zeros."""
    def change(file):
        file["inputs"].pop(name, None)
        if not stored:
            file["inputs"].create_dataset(name, shape, dtype)
            return
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        properties.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        group, _, leaf = f"inputs/{name}".rpartition("/")
        h5py.h5d.create(file.require_group(group).id, leaf.encode(), h5py.h5t.py_create(np.dtype(dtype)),
                        h5py.h5s.create_simple(shape), properties)

    return change


def endless(file):
    """So many tokens that no machine has the memory; the file has holes for them."""
    for name in ("initial_state", "d_final_state", "cu_seqlens"):
        file["inputs"].pop(name, None)
    for name, shape in (("q", (1, 1)), ("k", (1, 1)), ("v", (1, 1)), ("g", (1, 1)), ("beta", (1,)), ("d_out", (1, 1))):
        enormous(name, (10**11, *shape), "f2")(file)
    for name in ("A_log", "dt_bias"):
        replace(file, name, np.zeros((1,) if name == "A_log" else (1, 1), "f4"))


# What is done to a good input (case "packed"), further options, words of the message.
BROKEN = {
    "missing dataset": (edit(lambda f: f.__delitem__("inputs/v")), [], ("in.h5", "/inputs/v")),
    "missing d_out": (edit(lambda f: f.__delitem__("inputs/d_out")), [], ("in.h5", "/inputs/d_out", "--backward")),
    "wrong shape": (edit(lambda f: replace(f, "g", np.zeros((3, 2, 16), "f4"))), [],
                    ("in.h5", "/inputs/g", "expected")),
    "wrong type": (edit(lambda f: replace(f, "k", np.zeros(f["inputs/k"].shape, "i4"))), [],
                   ("in.h5", "/inputs/k", "expected")),
    "falling cu_seqlens": (edit(lambda f: replace(f, "cu_seqlens", np.array([0, 40, 20, 70]))), [],
                           ("in.h5", "cu_seqlens", "expected")),
    "overlong cu_seqlens": (edit(lambda f: replace(f, "cu_seqlens", np.array([0, 40, 2000]))), [],
                            ("in.h5", "cu_seqlens", "expected")),
    "NaN": (set_at("q", (5, 1, 2), np.nan), ["--check-finite"], ("in.h5", "/inputs/q", "finite", "head 1")),
    "NaN in d_out": (set_at("d_out", (5, 1, 2), np.nan), ["--check-finite"], ("in.h5", "/inputs/d_out", "finite")),
    "unknown attribute": (edit(lambda f: f["inputs"].attrs.__setitem__("gate", "tanh")), [], ("in.h5", "gate", "tanh")),
    "not HDF5": (lambda path: path.write_text("no file of this kind"), [], ("in.h5", "HDF5")),
    "truncated": (truncate, [], ("in.h5", "a truncated one")),
    "format version": (edit(lambda f: f.attrs.__setitem__("format_version", 99)), [], ("in.h5", "version", "99")),
    "contradiction": (lambda path: None, ["--gate", "softplus"], ("in.h5", "gate", "softplus")),
    "link to nothing": (edit(lambda f: replace(f, "k", h5py.SoftLink("/elsewhere"))), [],
                        ("in.h5", "/inputs/k", "link to nothing")),
    "no values": (edit(lambda f: replace(f, "k", h5py.Empty("f4"))), [], ("in.h5", "/inputs/k", "no values")),
    "option as an array": (edit(lambda f: f["inputs"].attrs.__setitem__("gate", np.array(["softplus"], object))), [],
                           ("in.h5", "gate", "expected")),
    "convolution as a link to nothing": (edit(lambda f: f.__setitem__("inputs/conv", h5py.SoftLink("/elsewhere"))), [],
                                         ("in.h5", "/inputs/conv", "link to nothing")),
    "convolution without values": (edit(lambda f: f.__setitem__("inputs/conv", h5py.Empty("f4"))), [],
                                   ("in.h5", "/inputs/conv", "no values")),
    "never written": (edit(lambda f: (f.__delitem__("inputs/g"), f.create_dataset("inputs/g", (70, 2, 16), "f4"))), [],
                      ("in.h5", "/inputs/g", "never written")),
    "another program's file": (edit(lambda f: (f.__delitem__("inputs/A_log"), f["inputs"].create_dataset(
        "A_log", (2,), "f4", external=[("/etc/passwd", 0, 8)]))), [], ("in.h5", "/inputs/A_log", "--allow-external")),
    "cu_seqlens without storage": (edit(enormous("cu_seqlens", (5 * 10**8,), "i8", stored=False)), [],
                                   ("in.h5", "/inputs/cu_seqlens", "never written")),
    "cu_seqlens of holes": (edit(enormous("cu_seqlens", (5 * 10**8,), "i8")), [],
                            ("in.h5", "/inputs/cu_seqlens", "at most 268435456 bytes")),
    "convolution without storage": (edit(enormous("conv/q_weight", (32, 10**11), stored=False)), [],
                                    ("in.h5", "/inputs/conv/q_weight", "never written")),
    "convolution of holes": (edit(lambda f: [enormous(f"conv/{x}_weight", (32, 10**10))(f) for x in "qkv"]), [],
                             ("in.h5", "/inputs/conv/q_weight", "at most 268435456 bytes")),
    "tokens without end": (edit(endless), [], ("memory", "available")),
    "plan of tokens without end": (edit(endless), ["--dry-run"], ("memory", "available")),
    "an attribute of 5 MB": (edit(lambda f: f["inputs"].attrs.create("gate", "x" * 5_000_000)), [],
                             ("in.h5", "gate", "expected")),
    "a number of 5 MB": (edit(lambda f: f.attrs.create("format_version", np.zeros(1_000_000))), [],
                         ("in.h5", "format_version", "expected 1")),
    "not built": (lambda path: None, ["--transport", "nccl"], ("nccl", "not built")),
    "no tolerance": (lambda path: None, ["--decay-skip", "certified"], ("tolerance",)),
}


@pytest.fixture
def files():
    with memory_folder() as name:
        source = Path(name) / "in.h5"
        write_case(cases.make("packed", dtype="float32"), source)
        yield source, Path(name) / "out.h5"


def assert_refused(source, output, code, err, words):
    assert code == USAGE, err[:2000]
    for word in words:
        assert word in err, err[:2000]
    assert len(err) < 4100 and "Traceback" not in err, err[:2000]
    assert {p.name for p in source.parent.iterdir()} <= {"in.h5", "job.toml"}, "something was written"


@pytest.mark.parametrize("what", BROKEN)
def test_broken_input_is_refused(files, capsys, what):
    source, output = files
    breaking, options, words = BROKEN[what]
    breaking(source)
    code = main(["run", str(source), str(output), "--backward", "--engine", "numpy", *options])
    assert_refused(source, output, code, capsys.readouterr().err, words)


@pytest.mark.parametrize("what", ["missing dataset", "NaN", "truncated", "contradiction"])
def test_all_ranks_refuse_it_together(files, what):
    source, output = files
    breaking, options, words = BROKEN[what]
    breaking(source)
    done = launch(3, "-m", "mpi_runner", "run", source, output, "--backward", "--engine", "numpy", *options)
    assert_refused(source, output, done.returncode, done.stderr, words)
    assert done.stderr.count("error:") == 1


def test_what_the_engine_does_not_take_is_told_before_it_is_read(files, capsys, monkeypatch):
    source, output = files

    def no_engine_for_this(self, *arguments, **named):
        raise InputError("engine: expected no such type")

    def read_nothing(self, *arguments):
        raise AssertionError("something was read")

    monkeypatch.setattr(HostEngine, "check", no_engine_for_this)
    monkeypatch.setattr(InputFile, "read", read_nothing)
    for more in ([], ["--dry-run"]):
        code = main(["run", str(source), str(output), "--engine", "numpy", *more])
        assert_refused(source, output, code, capsys.readouterr().err, ("in.h5", "expected no such type"))


def test_a_usage_error_is_told_once(files):
    source, output = files
    done = launch(3, "-m", "mpi_runner", "run", source, output, "--scan", "sideways")
    assert_refused(source, output, done.returncode, done.stderr, ("sideways",))
    assert done.stderr.count("error:") == 1


def test_positive_log_decay_is_found(files, capsys):
    source, output = files
    write_case(cases.make("log-logit", dtype="float32"), source)
    set_at("g", (7, 1, 3), 0.5)(source)
    code = main(["run", str(source), str(output), "--engine", "numpy", "--check-finite"])
    words = ("in.h5", "/inputs/g", "log decay at most 0", "token 7")
    assert_refused(source, output, code, capsys.readouterr().err, words)


def test_the_place_of_a_bad_value_is_that_of_the_whole_input(files):
    """Found on the last rank of three, named by its packed token."""
    source, output = files
    case = cases.make("ordinary", dtype="float32")
    write_case(case, source)
    last = len(case.q) - 1
    set_at("v", (last, 0, 0), np.inf)(source)
    done = launch(3, "-m", "mpi_runner", "run", source, output, "--engine", "numpy", "--check-finite")
    assert_refused(source, output, done.returncode, done.stderr, ("rank 2", "/inputs/v", f"packed token {last}"))


def test_input_as_output_is_refused_even_by_force(files, capsys):
    source, _ = files
    before = source.read_bytes()
    assert main(["run", str(source), str(source), "--engine", "numpy", "--force"]) == USAGE
    assert "another file" in capsys.readouterr().err
    assert source.read_bytes() == before


def test_an_existing_output_needs_force(files, capsys):
    source, output = files
    output.write_bytes(b"older")
    assert main(["run", str(source), str(output), "--engine", "numpy"]) == USAGE
    assert "--force" in capsys.readouterr().err
    assert output.read_bytes() == b"older"
    assert main(["run", str(source), str(output), "--engine", "numpy", "--force"]) == PASS
    assert output.read_bytes() != b"older"


@pytest.mark.parametrize("output, word", [("folder", "got a folder"), ("missing/out.h5", "existing folder"),
                                          ("n" * 300, "too long")])
def test_a_name_that_cannot_be_written_is_told_before_anything_is_computed(files, capsys, monkeypatch, output, word):
    source, _ = files
    (source.parent / "folder").mkdir()
    monkeypatch.setattr(RankProblem, "forward", lambda *_, **__: pytest.fail("computed"))
    assert main(["run", str(source), str(source.parent / output), "--engine", "numpy", "--force"]) == USAGE
    assert word in capsys.readouterr().err
    assert {p.name for p in source.parent.iterdir()} == {"in.h5", "folder"}


@pytest.mark.parametrize("text, word", [
    ("backwards = true", "backwards"), ("tolerance = 'much'", "tolerance"), ("scan = 'sideways'", "sideways"),
    ("backward = 1", "backward"), ("backward = ", "TOML"), ("gate = 'softplus'", "gate"),
    ("exchange-timeout = 0", "exchange_timeout"), ("exchange-timeout = inf", "exchange_timeout"),
    ("engine = '\udcff'", "TOML")])
def test_a_wrong_job_file_is_refused(files, capsys, text, word):
    source, output = files
    config = source.with_name("job.toml")
    config.write_text(text, errors="surrogateescape")
    code = main(["run", str(source), str(output), "--engine", "numpy", "--config", str(config)])
    assert_refused(source, output, code, capsys.readouterr().err, (word,))


def test_the_command_line_wins_over_the_job_file(files):
    source, output = files
    config = source.with_name("job.toml")
    config.write_text('engine = "reference"\nbackward = true\ngate = "lower_bound"\n')
    assert main(["run", str(source), str(output), "--config", str(config), "--engine", "numpy"]) == PASS
    with h5py.File(output) as file:
        report = file["report/json"].asstr()[()]
        assert '"engine": "numpy"' in report and "grads/dq" in file


def test_saying_the_default_scale_agrees_with_a_file_without_one(files, capsys):
    source, output = files
    run = lambda scale: main(["run", str(source), str(output), "--engine", "numpy", "--force", "--scale", str(scale)])
    assert run(0.25) == PASS, "1 / sqrt(16)"
    assert run(0.5) == USAGE and "scale" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(files, capsys):
    source, output = files
    assert main(["run", str(source), str(output), "--backward", "--engine", "numpy", "--dry-run"]) == PASS
    assert "rank 0: tokens 0:" in capsys.readouterr().out
    assert main(["run", str(source), str(output), "--backward", "--engine", "numpy", "--dry-run", "--json"]) == PASS
    told = json.loads(capsys.readouterr().out)
    assert told["engine"] == "numpy" and told["ranks"][0]["tokens"][0] == 0 and told["ranks"][0]["memory_bytes"] > 0
    assert not output.exists()


def test_where_the_time_went_is_told_wholly(files, capsys):
    source, output = files
    run = ["run", str(source), str(output), "--engine", "numpy", "--force"]
    assert main(run) == PASS
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    seconds = {row[0]: float(row[1]) for row in rows if len(row) > 1 and row[1].replace(".", "", 1).isdigit()}
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, abs=1e-3) and 0 < total <= seconds_since_start() + 0.01
    assert "tokens a second" in " ".join(next(row for row in rows if row[0] == "total"))
    assert main([*run, "--json"]) == PASS
    assert total <= json.loads(capsys.readouterr().out)["wall_seconds"] <= seconds_since_start()


def test_a_full_disk_is_told_before_anything_is_computed(files, monkeypatch):
    source, output = files
    usage = shutil.disk_usage(source.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10))
    from mpi_runner.resources import ResourceError, check_disk

    with pytest.raises(ResourceError, match="needs 11 bytes"):
        check_disk(output, 11)


def test_what_lies_outside_the_input_is_read_on_request(files, capsys):
    source, output = files
    with h5py.File(source, "r+") as file, h5py.File(source.parent / "q.h5", "w") as other:
        file["inputs/k"][...].tofile(source.parent / "k.bin")
        shape = file["inputs/k"].shape
        other["q"] = file["inputs/q"][...]
        del file["inputs/k"], file["inputs/q"]
        outside = [(str(source.parent / "k.bin"), 0, 4 * np.prod(shape))]
        file["inputs"].create_dataset("k", shape, "f4", external=outside)
        file["inputs/q"] = h5py.ExternalLink("q.h5", "q")
    command = ["run", str(source), str(output), "--engine", "numpy"]
    assert main(command) == USAGE and not output.exists()
    assert "--allow-external" in capsys.readouterr().err
    assert main([*command, "--allow-external"]) == PASS
    (source.parent / "job.toml").write_text("allow-external = true\nforce = true")
    assert main([*command, "--config", str(source.parent / "job.toml")]) == PASS
    whole = source.with_name("whole.h5")
    write_case(cases.make("packed", dtype="float32"), whole)
    assert main(["run", str(whole), str(whole.with_name("expected.h5")), "--engine", "numpy"]) == PASS
    with ResultFile(output) as one, ResultFile(whole.with_name("expected.h5")) as two:
        assert np.array_equal(one.read("outputs/out"), two.read("outputs/out"))


@pytest.mark.parametrize("io", ["gather", "shards"])
def test_names_need_not_be_utf8(files, io):
    source, output = files
    odd_source, odd_output = (path.with_name(os.fsdecode(b"\xff-" + path.name.encode())) for path in files)
    source.rename(odd_source)
    assert main(["run", str(odd_source), str(odd_output), "--engine", "numpy", "--io", io]) == PASS
    with ResultFile(odd_output) as result:
        assert result.report["job"]["input"] == str(odd_source)
        assert np.isfinite(result.read("outputs/out")).all()
    with h5py.File(odd_output) as file:
        assert np.isfinite(file["outputs/out"][()]).all()


def test_a_file_that_is_being_written_is_told(files, capsys):
    source, output = files
    hold = "import h5py, sys; file = h5py.File(sys.argv[1], 'r+'); print('open', flush=True); sys.stdin.read()"
    command, pipe = [sys.executable, "-c", hold, source], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as writer:
        assert writer.stdout.readline()
        code = main(["run", str(source), str(output), "--engine", "numpy"])
        writer.stdin.close()
    assert_refused(source, output, code, capsys.readouterr().err, ("in.h5", "open for writing elsewhere"))
