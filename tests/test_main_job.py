"""The main job under mpirun: every case, rank count, route and cut gives the oracle's results."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from launcher import TESTS, launch, memory_folder
from mpi.all_cases import write_case
from oracle import run, upcast

import kda_engine as kda
from kda_engine import cases
from kda_engine.hdf5.results import ResultFile
from kda_engine.partition import partition
from mpi_runner.report import PHASES

RANKS = (1, 2, 3, 4, 7)


@pytest.fixture(scope="module")
def folder():
    with memory_folder() as name:
        folder = Path(name)
        expected = {case: run(upcast(cases.make(case)), "reference") for case in cases.names()}
        (folder / "expected.pickle").write_bytes(pickle.dumps(expected))
        yield folder


def result_of(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("sweep, runs", [("float64", 4), ("float32", 2)])
@pytest.mark.parametrize("ranks", RANKS)
def test_every_case_equals_the_oracle(folder, ranks, sweep, runs):
    result = result_of(launch(ranks, TESTS / "mpi" / "all_cases.py", folder, sweep, timeout=600))
    assert result["failures"] == []
    # out, final_state and at least eight gradients of every run were compared.
    assert result["compared"] >= 9 * runs * len(cases.names())


def test_a_cut_at_every_chunk_and_sequence_boundary(folder):
    result = result_of(launch(2, TESTS / "mpi" / "all_cases.py", folder, "cuts", timeout=600))
    assert result["failures"] == []
    assert result["compared"] >= 9 * 2 * 10


@pytest.mark.parametrize("scan", ["serial", "allgather"])
def test_states_and_gradients_at_the_cuts_are_saved(folder, scan):
    """What enters the later ranks, whichever way it came."""
    case = cases.make("ordinary", dtype="f8")
    write_case(case, folder / "in.h5")
    done = launch(3, "-m", "mpi_runner", "run", folder / "in.h5", folder / f"{scan}.h5", "--engine", "numpy",
                  "--backward", "--save-boundary", "--force", "--scan", scan)
    assert done.returncode == 0, done.stderr
    # The phases of all ranks in the order of the work, then what lies outside of them.
    *phases, outside, total = [line.split()[0] for line in done.stdout.splitlines()[2:-1]]
    assert phases == [phase for phase in PHASES if phase in phases] and "forward" in phases
    assert (outside, total) == ("outside", "total")
    with ResultFile(folder / f"{scan}.h5") as result:
        rows = result.report["ranks"]
        assert result.report["device_skip"] == [] and result.report["dropped_total"] == 0.0
    assert all(row["paths"] == {"left": {"path": "numpy", "reason": None}} for row in rows[1:])
    state = case.initial_state.nbytes
    # One rank in the middle: it gathers S and M, or hands on one state in each direction.
    assert rows[1]["bytes"]["gather"] == (2 * (state + 2 * state) if scan == "allgather" else 2 * state)
    assert all(sum(row["bytes"].values()) <= row["bytes_sent"] for row in rows)
    cuts = [segment.start for segment in partition([0, len(case.q)], 3)]
    with ResultFile(folder / f"{scan}.h5") as result:
        entering, behind = result.read("boundary/S_in"), result.read("boundary/dS_out")
    assert np.isnan(entering[0]).all() and np.isnan(behind[-1]).all()
    for rank in (1, 2):
        first = {name: getattr(case, name)[: cuts[rank]] for name in ("q", "k", "v", "g", "beta")}
        state = kda.forward(**first, A_log=case.A_log, dt_bias=case.dt_bias, options=case.options, engine="reference",
                            initial_state=case.initial_state).final_state
        assert kda.compare(entering[rank], state[0]) < 1e-12
        rest = {name: getattr(case, name)[cuts[rank] :] for name in ("q", "k", "v", "g", "beta")}
        fwd = kda.forward(**rest, A_log=case.A_log, dt_bias=case.dt_bias, options=case.options, engine="reference",
                          initial_state=state)
        gradient = kda.backward(fwd, case.d_out[cuts[rank] :], case.d_final_state).d_initial_state
        assert kda.compare(behind[rank - 1], gradient[0]) < 1e-12


@pytest.mark.parametrize("ranks, io", [(1, "gather"), (3, "auto"), (3, "gather"), (3, "shards")])
def test_results_that_are_not_finite_are_reported(folder, ranks, io):
    case = cases.make("ragged", dtype="f4")
    bounds, V = case.cu_seqlens, case.v.shape[2]
    # A query counts for its own token's output alone; a value for all states behind it in its sequence.
    sequence = int(np.argmax(np.diff(bounds)))
    case.q[bounds[sequence] + 5, 0, 0] = np.nan
    case.v[bounds[sequence + 1] - 1, 1, 3] = np.inf
    write_case(case, folder / "spoilt.h5")
    done = launch(ranks, "-m", "mpi_runner", "run", folder / "spoilt.h5", folder / "out.h5", "--engine", "reference",
                  "--force", "--io", io)
    assert done.returncode == 0, done.stderr
    with ResultFile(folder / "out.h5") as result:
        told, out, states = result.report["not_finite"], *map(result.read, ("outputs/out", "outputs/final_state"))
    heads = case.v.shape[1] // case.q.shape[1]
    assert told == {
        "outputs/out": {"count": int((~np.isfinite(out)).sum()), "first": {"sequence": sequence, "head": 0, "token": 5}},
        "outputs/final_state": {"count": int((~np.isfinite(states)).sum()), "first": {"sequence": sequence, "head": 1}}}
    assert told["outputs/out"]["count"] > heads * V


@pytest.mark.parametrize("ranks, unseen", [(1, False), (2, False), (5, False), (3, True)])
def test_every_rank_writes_its_own_rows(folder, ranks, unseen):
    done = launch(ranks, TESTS / "mpi" / "direct_output.py", folder / "direct.h5", *["unseen"] * unseen)
    assert result_of(done) == {"wrong": [], "not_finite": 0}


@pytest.mark.parametrize("ranks", [2, 4])
def test_certified_skip_stays_within_the_bounds_it_reports(folder, ranks):
    result = result_of(launch(ranks, TESTS / "mpi" / "decay_skip.py", folder))
    assert result["failures"] == []
    assert result["looked_at"] > 100
    for name in ("strong", "heads-differ", "one-sided"):
        assert result["dropped"][name] > 0, f"{name}: nothing was dropped, so nothing was shown"
    for name in ("relay", "alternating", "alternating-reflecting", "weak", "repeat"):
        assert result["fallbacks"][name], name


def test_one_message_to_the_neighbour_only_where_that_is_enough(folder):
    """Asked for where a transition matters, it is refused on all ranks and nothing is written."""
    case = cases.make("strong", dtype="f8", tokens=1500)
    write_case(case, folder / "in.h5")
    run = lambda *more: launch(3, "-m", "mpi_runner", "run", folder / "in.h5", folder / "near.h5", "--engine", "numpy",
                               "--backward", "--scan", "neighbour", *more)
    done = run()
    assert done.returncode == 2 and "needs a run in which no rank's transition matters" in done.stderr
    assert not (folder / "near.h5").exists()
    done = run("--tolerance", "1e-6")
    assert done.returncode == 0, done.stderr
    with ResultFile(folder / "near.h5") as result:
        report = result.report
    assert report["scan"] == "neighbour" and report["transport"] == "mpi"
    # A state forward and a gradient back, whatever the number of ranks.
    state = 8 * case.k.shape[1] * case.k.shape[2] * case.v.shape[2]
    assert [row["bytes"]["gather"] for row in report["ranks"]] == [state, 2 * state, state]
