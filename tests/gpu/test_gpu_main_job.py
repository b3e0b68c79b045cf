"""The main job with engine "cuda" on two ranks that share one device: every tensor against the oracle's."""

import os

import numpy as np
import pytest
from launcher import launch, memory_folder
from stages import TOKENS

import kda_engine as kda
from kda_engine import cases
from kda_engine.compare import tolerance_for
from kda_engine.device.device import current
from kda_engine.evaluation import reference
from kda_engine.hdf5.results import ResultFile
from kda_engine.hdf5.schema import STATE_RESULTS, TOKEN_RESULTS
from mpi_runner.__main__ import main

# How much more the parameters' gradients may show than outputs: sums whose terms cancel.
CANCELLING = 4

FUSED = {"K": 128, "V": 128, "dtype": "bfloat16"}
CERTIFIED = ("--decay-skip", "certified", "--tolerance", "1e-6")

# name, case, its sizes and type, ranks, options of the run
RUNS = [
    ("certified", "strong", {"tokens": 700, **FUSED}, 2, CERTIFIED),
    # The middle rank's share is but a part of one sequence.
    ("relayed", "weak", {"tokens": 700, **FUSED}, 3, ()),
    ("ragged", "ragged", {"tokens": 1500, **FUSED}, 2, ("--check-finite", "--save-boundary")),
    ("convolved", "conv-biased", {"tokens": 300, **FUSED}, 2, ("--check-finite",)),
    ("portable", "softplus-value", {"tokens": 300, "dtype": "float16"}, 2, ("--scan", "serial", "--io", "shards")),
    *((f"scan-{scan}", "weak", {"tokens": 300, **FUSED}, 3, ("--scan", scan))
      for scan in ("serial", "chain", "allgather", "heads", "exscan", "levels")),
    ("scan-neighbour", "strong", {"tokens": 700, **FUSED}, 2, (*CERTIFIED, "--scan", "neighbour")),
]


@pytest.fixture(scope="module")
def folder():
    with memory_folder() as name:
        yield name


def run_on_device(folder, name, case, sizes, ranks, *options):
    """(CompletedProcess, path of the output)"""
    given, output = os.path.join(folder, f"{name}.h5"), os.path.join(folder, f"{name}-out.h5")
    flags = [text for key, value in sizes.items() for text in (f"--{key}", str(value))]
    assert main(["input", "--case", case, *flags, "--force", given]) == 0
    # One device, however many this machine has.
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    done = launch(ranks, "-m", "mpi_runner", "run", given, output, "--backward", "--engine", "cuda", "--force",
                  *options, environment={"CUDA_VISIBLE_DEVICES": first})
    return done, output


@pytest.mark.parametrize("name, case, sizes, ranks, options", RUNS, ids=[run[0] for run in RUNS])
def test_it_equals_the_oracle(folder, name, case, sizes, ranks, options):
    done, output = run_on_device(folder, name, case, sizes, ranks, "--oversubscribe", *options)
    assert done.returncode == 0, done.stderr
    problem = cases.make(case, **sizes)
    expected, allowed = reference(problem), tolerance_for(sizes["dtype"], convolved=problem.conv is not None)
    with ResultFile(output) as result:
        report = result.report
        found = {tensor: result.read(tensor) for tensor in result.tensors() if not tensor.startswith("boundary/")}
    assert found.keys() == expected.keys()
    for tensor, x in found.items():
        tolerance = allowed
        if tensor.startswith("grads/"):
            tolerance *= TOKENS if tensor in (*TOKEN_RESULTS, *STATE_RESULTS) else CANCELLING
        # NaN is not at most anything.
        assert kda.compare(x, expected[tensor]) <= tolerance, tensor
    assert report["engine"] == "cuda" and "CPU" not in report["ranks"][-1]["device"]
    # At least one sequence goes from rank to rank.
    pieces = [{sequence for sequence, _, _ in row["pieces"]} for row in report["ranks"]]
    assert all(left & right for left, right in zip(pieces, pieces[1:]))
    paths = [group["path"] for row in report["ranks"] for group in row["paths"].values()]
    assert paths and set(paths) == {"portable" if name == "portable" or not current().target.hopper else "fused"}
    assert np.isfinite(report["dropped_total"]) and (report["dropped_total"] > 0) == (options[:4] == CERTIFIED)
    assert all(row["where"] == "device" and row["rule"] == "certified" for row in report["device_skip"])
    if options[:4] == CERTIFIED:
        assert report["decay_skip"] and not any(any(row["fallback"]) for row in report["decay_skip"])
        assert 0 < np.max([row["total_bound"] for row in report["decay_skip"]]) < 1e-3


@pytest.mark.parametrize("case", ("relay", "strong", "repeat"))
def test_errors_of_certified_ranks_are_within_what_is_told(folder, case):
    """At a tolerance that drops what matters where it can; `relay` hands its state on and may drop nothing."""
    sizes = {"tokens": 320, "heads": 2, **FUSED}
    done, output = run_on_device(folder, f"told-{case}", case, sizes, 2, "--oversubscribe", "--decay-skip", "certified",
                                 "--tolerance", "0.3")
    assert done.returncode == 0, done.stderr
    with ResultFile(output) as result:
        total = result.report["dropped_total"]
        found = {tensor: result.read(tensor) for tensor in result.tensors() if not tensor.startswith("boundary/")}
    assert np.isfinite(total) and (total == 0 or case != "relay")
    problem = cases.make(case, **sizes)
    allowed, size = tolerance_for("bfloat16", problem.repeated_keys), lambda x: np.linalg.norm(x.astype("f8"))
    for tensor, x in reference(problem).items():
        # States and their gradients: the total itself. All else is linear in them, with factors of the order of its size.
        reach = 1.0 if "state" in tensor else max(1.0, size(x))
        rounding = allowed * size(x) * (CANCELLING if "A_log" in tensor or "dt_bias" in tensor else TOKENS)
        assert size(found[tensor].astype("f8") - x) <= total * reach + rounding, tensor


def test_two_ranks_share_a_device_only_when_told(folder):
    done, output = run_on_device(folder, "refused", "ordinary", {}, 2)
    assert done.returncode == 2 and "--oversubscribe" in done.stderr
    assert not os.path.exists(output)
