"""The probes with little work: what they compute, and that their figures are numbers; no time is judged."""

import json

import numpy as np
import pytest
from product_sums import expected_sums

from kda_engine.bench import probes
from kda_engine.bench.predictions import PREDICTIONS
from kda_engine.device.kernels.probes import PROBE_WIDTHS

pytestmark = pytest.mark.usefixtures("needs_hopper")


@pytest.mark.parametrize("warpgroups", (1, 2))
@pytest.mark.parametrize("width", PROBE_WIDTHS)
def test_products(width, warpgroups):
    cycles, sums = probes.Probes(4).products(width, warpgroups, rounds=3)
    assert (cycles > 0).all() and all(block.tobytes() == sums[0].tobytes() for block in sums)
    found = sums[0].reshape(warpgroups, 128).sum(axis=1, dtype="f8")
    assert np.abs(found - expected_sums(width, warpgroups, rounds=3)).max() <= 1e-6 * np.abs(sums[0]).sum()


@pytest.mark.parametrize("chunks", (1, 5, 12, 13, 100))
def test_the_chain_is_the_recurrence(chunks):
    few = probes.Probes(4)
    assert max(few.check(chunks).values()) <= few.tolerance()


@pytest.mark.parametrize("send", (False, True))
def test_peer_does_not_change_the_result(send):
    few = probes.Probes(4)
    step, results = few.peer(100, turns=50, send=send)
    assert step > 0 and results["interval"] >= 0.9 * probes.INTERVAL
    assert results["final_state"].tobytes() == few.roles(False, True, 100)[1]["final_state"][::2].tobytes()


def test_the_program(tmp_path, capsys):
    path = tmp_path / "probes.json"
    assert probes.main(["--json", str(path), "--chunks", "64", "--rounds", "4"]) == 0
    record = json.loads(path.read_text())
    for part in ("few", "all"):
        assert record[part]["figures"].keys() == PREDICTIONS.keys() and len(record[part]["products"]) == 10
        assert np.isfinite(list(record[part]["figures"].values())).all()
        assert all(record[part]["figures"][name] > 0 for name in PREDICTIONS if name != "peer")
    assert "| probe | unit | predicted |" in capsys.readouterr().out
