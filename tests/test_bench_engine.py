"""`bench` of an engine: checked before timed, every sample in the record; tiny shapes, no time is judged."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import kda_engine as kda
from kda_engine.bench import clocks, host, samples, table
from kda_engine.bench.host import Host
from kda_engine.bench.problem import Problem
from kda_engine.bench.record import CONTROL, OURS, make_record, read_record
from kda_engine.bench.shapes import SHAPES, draw, draw_gradients, parse
from kda_engine.engines.host import HostEngine
from kda_engine.errors import InputError
from mpi_runner.__main__ import main


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Nothing large is copied or multiplied for the sake of the machine's rates."""
    monkeypatch.setattr(Host, "bandwidth", lambda self: 1e10)
    monkeypatch.setattr(Host, "matrix_rate", lambda self: 1e11)
    monkeypatch.setattr(host, "FLUSH_BYTES", 1 << 10)


def bench(*arguments):
    return main(["bench", *map(str, arguments)])


def test_page_and_record(tmp_path, capsys):
    path = tmp_path / "record.json"
    assert bench("--shape", "40x1", "2x17x2", "--backward", "--samples", 3, "--output", path) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith("| forward")]
    assert [line.split(" | ")[0] for line in lines] == [
        "| forward 40x1 strong", "| forward+backward 40x1 strong", "| forward 2x17x2 strong",
        "| forward+backward 2x17x2 strong"]
    assert "all: gate lower_bound, engine numpy, cache cold, launch direct, skip exact, path numpy" in out and "load average" in out
    record = read_record(path)
    assert record["mode"] == "engine" and record["machine"]["threads"] >= 1 and record["provenance"]["engine_version"]
    assert record["ceilings"] == {"bandwidth": 1e10, "matrix_rate": 1e11}
    row = record["rows"][2]
    assert row["problem"] == {"lengths": [17, 17], "heads": 2, "head_size": 128, "dtype": "float32", "tolerance": 0.0}
    assert set(row["samples"]) == {OURS, CONTROL} and all(len(taken) == 3 for taken in row["samples"].values())
    assert all(x > 0 for taken in row["samples"].values() for x in taken)
    assert 0 < row["error"] <= row["allowed"] and row["bytes"] > 0 and row["flops"] > 0


def test_the_columns_follow_from_the_record():
    """Floor 1 ms of 2 ms, a tenth of the matrix rate, and a peer that takes twice as long."""
    row = {"case": {"what": "forward", "shape": "A", "regime": "weak", "engine": "cuda"}, "error": 1e-3,
           "allowed": 3e-3, "bytes": 10**9, "flops": 2 * 10**9,
           "samples": {OURS: [1e-3, 2e-3, 3e-3], CONTROL: [9.0] * 3, "fla": [4e-3] * 3}, "peer_errors": {"fla": 2e-3},
           "peak_bytes": 3 << 29, "host_seconds": 50e-6, "kernels": {"prepare": [1e-3, 1e-3]},
           "state": {"before": {"sm_mhz": 1980, "celsius": 40, "lowered_by": []},
                     "after": {"sm_mhz": 1700, "celsius": 60, "lowered_by": ["SwPowerCap"]}}}
    by = {"utc": "now", "engine_version": "1", "commit": None, "command": ["bench"]}
    page = table.markdown(make_record("engine", by, {"name": "GPU"}, {"bandwidth": 1e12, "matrix_rate": 1e13}, [row]))
    assert ("| forward A weak | 1.0e-03 | 2 | 1 | 1 | 50.0% | 10.0% | 50 | 1.5 | 4 | 2.00 | 2.0e-03 |") in page
    assert "| forward A weak engine" not in page and "SM clock in MHz 1700 to 1980" in page
    assert "clocks lowered by SwPowerCap" in page
    assert "| prepare | 1 | 0 |" in page
    rows = [row | {"path": path} for path in ("fused", "portable")]
    page = table.markdown(make_record("engine", by, {"name": "GPU"}, {"bandwidth": 1e12, "matrix_rate": 1e13}, rows))
    assert " | 2.0e-03 | fused |" in page and " | 2.0e-03 | portable |" in page


def test_stages(tmp_path):
    path = tmp_path / "record.json"
    assert bench("--shape", "40x2", "--stages", "--samples", 2, "--output", path) == 0
    rows = {row["case"]["what"]: row for row in read_record(path)["rows"]}
    assert set(rows) == {"forward", *(f"stage {name}" for name in ("summarise", "forward", "summarise_backward",
                                                                     "backward"))}
    assert all(len(row["samples"][OURS]) == 2 and row["error"] <= row["allowed"] for row in rows.values())


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_result_that_fails_its_check_is_not_timed(tmp_path, capsys, monkeypatch, wrong):
    forward = HostEngine.forward

    def faulty(self, *arguments):
        result = forward(self, *arguments)
        result.out[-1] *= wrong
        return result

    monkeypatch.setattr(HostEngine, "forward", faulty)
    path = tmp_path / "record.json"
    assert bench("--shape", "20x1", "--samples", 2, "--output", path) == 1
    row, = read_record(path)["rows"]
    assert "samples" not in row and (row["error"] is None if wrong != wrong else row["error"] > row["allowed"])
    out = capsys.readouterr().out
    assert "Failed their check" in out and "not timed" in out and "| ms |" not in out


def test_a_peer_is_measured_in_turn_and_its_distance_shown(tmp_path, capsys, monkeypatch):
    """One that computes the half: its time is shown beside an error that no reader will miss."""
    def half(inputs, cu_seqlens, options):
        return lambda: (0.5 * kda.forward(**inputs, cu_seqlens=cu_seqlens, options=options, engine="numpy").out[None],)

    monkeypatch.setattr(Host, "peers", lambda self: {"half": half})
    path = tmp_path / "record.json"
    assert bench("--shape", "20x1", "--samples", 2, "--output", path) == 0
    row, = read_record(path)["rows"]
    assert set(row["samples"]) == {OURS, CONTROL, "half"} and row["peer_errors"]["half"] == pytest.approx(0.5)
    assert "half ms | half / ours | half from ours" in capsys.readouterr().out


def test_every_gate_is_measured_and_peers_where_they_have_it(tmp_path, capsys, monkeypatch):
    def bounded(inputs, cu_seqlens, options):
        call = lambda: (kda.forward(**inputs, cu_seqlens=cu_seqlens, options=options, engine="numpy").out[None],)
        return call if options.gate == "lower_bound" else None

    monkeypatch.setattr(Host, "peers", lambda self: {"bounded": bounded})
    path = tmp_path / "record.json"
    assert bench("--shape", "40x1", "--gate", "softplus", "log", "lower_bound", "--backward",
                 "--samples", 2, "--output", path) == 0
    rows = {row["case"]["gate"]: row for row in read_record(path)["rows"] if row["case"]["what"] == "forward"}
    assert {gate: "bounded" in row["samples"] for gate, row in rows.items()} == {
        "softplus": False, "log": False, "lower_bound": True}
    assert "| forward 40x1 strong softplus |" in capsys.readouterr().out


def test_a_peers_result_may_be_of_another_array_library():
    class Foreign:
        """What a tensor of PyTorch has in common with an array: DLPack, and none of the rest."""

        def __init__(self, x):
            self._x, self.dtype = x, str(x.dtype)

        def __dlpack__(self, **how):
            return self._x.__dlpack__(**how)

        def __dlpack_device__(self):
            return self._x.__dlpack_device__()

    problem = Problem(Host("machine"), "20x1", "strong", 0.0)
    assert problem.distance(Foreign(0.5 * problem.forward().out)) == pytest.approx(0.5)


@pytest.mark.parametrize("factor, code", [(1.0, 0), (1.01, 1)])
def test_a_replayed_graph_is_checked_too(tmp_path, monkeypatch, factor, code):
    """With a stand-in for the graph, whose arrays hold what the replay wrote."""
    class Replay:
        def __init__(self, call):
            self.result = call()

        def __call__(self):
            self.result.out[:] *= factor

    monkeypatch.setattr(Host, "capture", lambda self, call: Replay(call))
    path = tmp_path / "record.json"
    assert bench("--shape", "20x1", "--graph", "--samples", 2, "--output", path) == code
    row, = read_record(path)["rows"]
    assert row["case"]["launch"] == "graph" and ("samples" in row) == (code == 0)


def test_a_wrong_summary_is_not_timed(tmp_path, monkeypatch):
    summarise = HostEngine.summarise

    def faulty(self, *arguments, **named):
        pair = summarise(self, *arguments, **named)
        pair.M[:, -1] *= 1.5
        return pair

    monkeypatch.setattr(HostEngine, "summarise", faulty)
    path = tmp_path / "record.json"
    assert bench("--shape", "20x1", "--regime", "weak", "--stages", "--samples", 2, "--output", path) == 1
    assert {row["case"]["what"] for row in read_record(path)["rows"] if "samples" not in row} == {"stage summarise"}


def test_sweep(tmp_path):
    path = tmp_path / "record.json"
    assert bench("--tokens", 16, 33, "--heads", 1, 2, "--sequences", 1, 2, "--cache", "warm", "--samples", 2,
                 "--output", path) == 0
    assert [row["case"]["shape"] for row in read_record(path)["rows"]] == [
        "16x1", "2x16x1", "16x2", "2x16x2", "33x1", "2x33x1", "33x2", "2x33x2"]
    assert read_record(path)["rows"][0]["case"]["cache"] == "warm"


def test_more_samples_until_the_median_is_certain(tmp_path, monkeypatch):
    """Half as uncertain at four times as many; and an end to it."""
    random, asked = np.random.default_rng(0), []

    def measure(self, calls, samples, cold):
        asked.append(samples)
        return {name: random.normal(1.0, spread, samples).tolist() for name in calls}

    monkeypatch.setattr(Host, "measure", measure)
    for spread, share, rounds in ((0.0, "1%", 1), (0.1, "50%", 1), (1.0, "0", 10)):
        asked.clear()
        path = tmp_path / "record.json"
        assert bench("--shape", "9x1", "--samples", 20, "--until", share, "--output", path) == 0
        assert asked == [20] * rounds
        assert {len(x) for x in read_record(path)["rows"][0]["samples"].values()} == {20 * rounds}
    assert bench("--shape", "9x1", "--until", "much") == 2


def test_the_interval_holds_the_median():
    """In 95 of 100 series of samples, whatever their distribution; a little more often, since samples are whole."""
    random = np.random.default_rng(1)
    for count in (5, 30, 101):
        held = [low <= np.log(2) <= high for low, high in
                (samples.interval(random.exponential(size=count)) for _ in range(2000))]
        assert 0.93 <= np.mean(held) <= 0.99, count


def test_shapes_of_a_file_and_samples_in_rows(tmp_path, capsys):
    (tmp_path / "shapes").write_text("# small ones\n17x1\n\n2x9x2  # two sequences\n")
    assert bench("--shape-file", tmp_path / "shapes", "--samples", 3, "--csv", tmp_path / "samples.csv", "--output",
                 tmp_path / "record.json") == 0
    with open(tmp_path / "samples.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    record = read_record(tmp_path / "record.json")
    assert [row["case"]["shape"] for row in record["rows"]] == ["17x1", "2x9x2"]
    expected = [(row["case"]["shape"], side, seconds) for row in record["rows"] for side, taken in row["samples"].items()
                for seconds in taken]
    assert [(row["shape"], row["side"], float(row["seconds"])) for row in rows] == expected and len(expected) == 12
    (tmp_path / "empty").write_text("# none\n")
    for options, word in ((("--shape-file", tmp_path / "empty"), "got none"), (("--shape-file", tmp_path), "a folder"),
                          (("--shape-file", tmp_path / "no"), "got nothing"), (("--csv", tmp_path / "no" / "x"), "csv")):
        capsys.readouterr()
        assert bench(*options) == 2
        assert word in capsys.readouterr().err


@pytest.mark.parametrize("arguments, word", [
    (("--shape", "M"), "shape"), (("--shape", "0x4"), "shape"), (("--shape", "1x2x3x4"), "shape"),
    (("--heads", "4"), "tokens"), (("--tokens", "16", "--heads", "0"), "shape"), (("--samples", "1"), "samples"),
    (("--shape", "16x1", "--graph"), "graph"), (("--graph", "--backward"), "graph"),
    (("--shape", "16x1", "--peers", "fla"), "peers"), (("--tolerance", "2"), "tolerance"),
    (("--shape", "16x1", "--samples", "2", "--output", "/nowhere/record.json"), "output"),
])
def test_what_cannot_be_measured_is_refused(capsys, arguments, word):
    assert bench(*arguments) == 2
    assert f"{word}: " in capsys.readouterr().err


def test_shapes_by_name():
    assert all(parse(letter) is shape for letter, shape in SHAPES.items())
    assert parse("2048x16").lengths == (2048,) and parse("2048x16").heads == 16
    assert parse("4x8192x32") == SHAPES["J"] and parse("32x512x64") == SHAPES["K"]
    with pytest.raises(InputError):
        parse("axb")


def test_inputs_are_drawn_by_seed():
    shape = parse("2x9x3")
    first, again = (draw(shape, "weak", dtype="f4", module=np) for _ in range(2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert first["q"].shape == (18, 3, 128) and first["initial_state"].shape == (2, 3, 128, 128)
    gradients = draw_gradients(shape, dtype="f4", module=np)
    assert gradients["d_out"].shape == first["v"].shape
    assert gradients["d_final_state"].shape == first["initial_state"].shape
    assert not np.array_equal(gradients["d_out"], first["q"])


def test_the_sides_of_a_comparison_take_turns():
    order = []
    taken = Host("").measure({name: lambda name=name: order.append(name) for name in "ab"}, samples=3, cold=True)
    assert "".join(order) == "ab" + 3 * "ab" and [len(x) for x in taken.values()] == [3, 3]


def test_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    assert bench("--tokens", 16, 32, "--samples", 2, "--heads", 1, "--backward", "--plot", tmp_path / "new") == 0
    for name in ("tokens", "roofline"):
        assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_clocks_and_what_lowers_them(monkeypatch):
    """Through a stand-in with NVML's names; without it, or without a driver, nothing is said."""
    class NVMLError(Exception):
        pass

    constants = {f"nvmlClocksThrottleReason{name}": 1 << bit for bit, name in enumerate(clocks.REASONS)}
    nvml = SimpleNamespace(
        NVMLError=NVMLError, NVML_CLOCK_SM=1, NVML_CLOCK_MEM=2, NVML_TEMPERATURE_GPU=0, nvmlInit=lambda: None,
        nvmlShutdown=lambda: None, nvmlDeviceGetHandleByPciBusId=lambda bus: bus,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0b101,
        nvmlDeviceGetClockInfo=lambda handle, which: 1000 * which, nvmlDeviceGetTemperature=lambda handle, which: 50,
        nvmlDeviceGetPowerUsage=lambda handle: 350_000, **constants)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert clocks.read_clocks("0000:01:00.0") == {
        "sm_mhz": 1000, "memory_mhz": 2000, "celsius": 50, "watts": 350.0, "lowered_by": ["SwPowerCap", "SyncBoost"]}

    def no_driver():
        raise NVMLError

    nvml.nvmlInit = no_driver
    assert clocks.read_clocks("0000:01:00.0") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert clocks.read_clocks("0000:01:00.0") is None


def test_mpi_and_cupy_stay_away():

    script = ("import sys\nfrom mpi_runner.__main__ import main\nmain(['bench', '--shape', 'M'])\n"
              "sys.exit(42 if {'mpi4py.MPI', 'cupy', 'matplotlib'} & set(sys.modules) else 0)")
    root = Path(__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, cwd=root, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_record_is_json_that_others_can_read(tmp_path):
    path = tmp_path / "record.json"
    assert bench("--shape", "16x1", "--samples", 2, "--output", path) == 0
    content = json.loads(path.read_text())
    assert content["format"] == "kda-engine-bench" and content["format_version"] == 1
