"""`plan`: closed formulas of traffic, against the messages that the exchange really packs and against counting."""

import json

import numpy as np
import pytest

from kda_engine.partition import partition
from mpi_runner.__main__ import main
from mpi_runner.parallel.routes import ROUTES
from mpi_runner.prediction import Rates, predict
from mpi_runner.traffic import boundary_bytes, crossings, parameter_bytes, state_sizes

ONE_LONG = np.array([0, 1000])
# What carries any run; `neighbour` carries those without a rank that a sequence passes through.
SCANS = tuple(name for name in ROUTES if name != "neighbour")

# One head in float32: S takes 400 bytes, M 100.
HV, K, V = 1, 5, 20


def plan(capsys, *arguments):
    capsys.readouterr()
    assert main(["plan", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *arguments):
    capsys.readouterr()
    assert main(["plan", *map(str, arguments)]) == 2
    return capsys.readouterr().err


def sent(bounds, ranks, scan, backward):
    both = crossings(partition(np.array(bounds), ranks), HV, K, V, "f4", backward)
    return boundary_bytes(ROUTES[scan], both)


def test_one_sequence_over_four_ranks():
    assert sent(ONE_LONG, 4, "serial", False) == [400, 400, 400, 0]
    assert sent(ONE_LONG, 4, "serial", True) == [400, 800, 800, 400]
    # The first rank has no M to send, the last nothing at all; backward, D from all but the first.
    assert sent(ONE_LONG, 4, "allgather", False) == [1200, 1500, 1500, 0]
    assert sent(ONE_LONG, 4, "allgather", True) == [1200, 2700, 2700, 1200]
    assert sent(ONE_LONG, 4, "chain", False) == [400, 400, 400, 0]
    assert sent(ONE_LONG, 4, "chain", True) == [400, 800, 800, 400]
    # Rounds at distances 1 and 2, then a state each to the neighbour. Ranks that know their state send no M.
    assert sent(ONE_LONG, 4, "exscan", False) == [1200, 900, 400, 0]
    assert sent(ONE_LONG, 4, "exscan", True) == [1200, 1300, 1300, 1200]
    # The only head is scanned by the last rank, which sends two states back; backward it is the first, and sends three.
    assert sent(ONE_LONG, 4, "heads", False) == [400, 500, 500, 800]
    assert sent(ONE_LONG, 4, "heads", True) == [400, 900, 900, 2000]


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("backward", [False, True])
def test_one_rank_sends_nothing(scan, backward):
    assert sent(ONE_LONG, 1, scan, backward) == [0]
    assert parameter_bytes(8, 128, 1) == 0 and parameter_bytes(8, 128, 2) == 8 * 8 * 129


def test_sequences_that_end_where_ranks_do_need_no_boundary():
    for scan in ("serial", "allgather"):
        assert sent([0, 160, 320, 480], 3, scan, True) == [0, 0, 0]


def test_what_grows_with_the_ranks():
    """The gather grows with R, a hand-on does not."""
    largest = lambda scan, ranks: max(sent([0, 16 * ranks], ranks, scan, False))
    assert [largest("allgather", ranks) for ranks in (3, 4, 64)] == [1000, 1500, 63 * 500]
    assert [largest("serial", ranks) for ranks in (2, 4, 64)] == [400] * 3


def test_sizes_of_a_boundary():
    assert state_sizes(3, 4, 5, "f4") == (3 * 4 * 5 * 4, 3 * 4 * 4 * 4)


def test_shape_of_options(capsys):
    result = plan(capsys, "--tokens", 100, "--heads", 2, "--value-heads", 4, "--K", 8, "--V", 6, "--ranks", 3,
                  "--dtype", "bfloat16", "--backward")
    assert result["shape"] == {"T": 100, "H": 2, "HV": 4, "K": 8, "V": 6, "N": 1}
    assert [rank["tokens"] for rank in result["ranks"]] == [32, 32, 36]
    assert all(rank["memory_bytes"] > 0 for rank in result["ranks"])
    state = 4 * 8 * 6 * 4
    assert result["boundary_state_bytes"] == state and result["boundary_transition_bytes"] == 4 * 8 * 8 * 4
    per_token = 2 * (4 * 6 + 2 * 2 * 8 + 4 * 6 + 4 * 8 + 4)
    assert result["output_bytes"] == 100 * per_token + 2 * state
    assert result["scans"]["serial"]["total"] == 4 * state and list(result["scans"]) == list(SCANS)
    # Each rank hands on two thirds of it, and as much of the sum.
    assert result["parameter_sum_bytes"] == 2 * 8 * (4 + 4 * 8) * 2 // 3


def test_the_gather_of_a_large_model(capsys):
    """HV = 64, K = V = 128 in float32: 8 MiB a rank and partner."""
    result = plan(capsys, "--heads", 64, "--ranks", 16, "--tokens", 1 << 20)
    assert max(result["scans"]["allgather"]["bytes_sent"]) == 15 * 8 * 2**20


def test_shape_of_a_file(tmp_path, capsys):
    path = tmp_path / "x.h5"
    assert main(["input", "--case", "ragged", "--dtype", "float64", str(path)]) == 0
    result = plan(capsys, path, "--ranks", 2)
    assert result["shape"] == {"T": 132, "H": 2, "HV": 2, "K": 16, "V": 16, "N": 12}
    assert result["boundary_state_bytes"] == 2 * 16 * 16 * 8 and not result["backward"]
    assert sum(rank["tokens"] for rank in result["ranks"]) == 132


def text(capsys, *arguments):
    capsys.readouterr()
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def rows(lines, count):
    """The table's rows by their first word: {column name: number}."""
    names = lines[2].split()[1:]
    return {name: dict(zip(names, map(float, numbers), strict=True))
            for name, *numbers in map(str.split, lines[3:3 + count])}


def test_text_names_every_scan_and_rank(capsys):
    lines = text(capsys, "--ranks", 3, "--backward", "--per-rank")
    assert lines[0] == "forward and backward of T 8192 H 8 HV 8 K 128 V 128 N 1 on 3 ranks"
    assert all(scan in lines[2] for scan in SCANS)
    assert list(rows(lines, 4)) == ["0", "1", "2", "all"]


def test_text_has_the_smallest_and_the_largest_of_many_ranks(capsys):
    """A thousand ranks take no more lines than two; the numbers are those of the ranks, in GiB."""
    shape = ("--ranks", 1000, "--tokens", 100000, "--sequences", 7)
    lines, full = text(capsys, *shape), plan(capsys, *shape)
    assert len(lines) == len(text(capsys, "--ranks", 2)) < 12
    found = rows(lines, 3)
    assert list(found) == ["smallest", "largest", "all"]
    for name, pick in (("smallest", min), ("largest", max)):
        assert found[name]["tokens"] == pick(rank["tokens"] for rank in full["ranks"])
        assert found[name]["sequences"] == pick(rank["sequences"] for rank in full["ranks"])
        for scan, row in full["scans"].items():
            assert found[name][scan] == pytest.approx(pick(row["bytes_sent"]) / 2**30, rel=1e-3)
    assert found["all"]["tokens"] == 100000 and found["all"]["sequences"] == 7
    assert found["all"]["memory"] == pytest.approx(sum(rank["memory_bytes"] for rank in full["ranks"]) / 2**30, rel=1e-3)
    assert found["smallest"]["tokens"] < found["largest"]["tokens"]


def test_what_is_read_and_written(tmp_path, capsys):
    shape = ("--tokens", 1 << 20, "--heads", 2, "--K", 64, "--V", 128)
    # q, k, g of 64 channels, v of 128 and a beta, four bytes each.
    read = (1 << 20) * 2 * (3 * 64 + 128 + 1) * 4
    assert plan(capsys, *shape)["input_bytes"] == read
    assert text(capsys, *shape)[1].startswith(f"reads {read / 2**30:.4g} GiB, writes 1 GiB; ")


def test_wrong_requests(tmp_path, capsys):
    assert "ranks: expected at least 1, got 0" in refused(capsys, "--ranks", 0)
    assert "K: expected at least 1, got 0" in refused(capsys, "--K", 0)
    assert "tokens: expected at least 0, got -1" in refused(capsys, "--tokens", -1)
    assert "value_heads: expected a multiple of 8 heads, got 9" in refused(capsys, "--value-heads", 9)
    assert "dtype: expected bfloat16" in refused(capsys, "--dtype", "int8")
    assert str(tmp_path / "no.h5") in refused(capsys, tmp_path / "no.h5")
    assert main(["input", "--case", "ordinary", str(tmp_path / "x.h5")]) == 0
    assert "--K: expected without INPUT.h5" in refused(capsys, tmp_path / "x.h5", "--K", 3)


# Per second: 10 tokens x heads forward, 5 backward, 20 summarised, 300 bytes; 2 seconds a message.
RATES = Rates(forward=10, backward=5, summary=20, bandwidth=300, latency=2)


def predicted(bounds, ranks, scan, backward):
    """Seconds with 3 value heads, 300 bytes of state and 12 of transition."""
    return predict(ROUTES[scan], crossings(partition(np.array(bounds), ranks), 3, 1, 25, "f4", backward), RATES)


def test_seconds_of_one_sequence_over_four_ranks():
    # 64 tokens, 16 a rank: 4.8 s of forward, 2.4 s of summary, 9.6 s of backward.
    bounds = [0, 64]
    assert predicted(bounds, 1, "allgather", False) == pytest.approx(4 * 4.8)
    # Four ranks one after the other, three messages of 2 s and 1 s of bytes.
    assert predicted(bounds, 4, "serial", False) == pytest.approx(4 * 4.8 + 3 * 3)
    assert predicted(bounds, 4, "serial", True) == pytest.approx(4 * (4.8 + 9.6) + 2 * 3 * 3)
    # Two rounds; the inner ranks send S and M to three others, backward D to three others.
    assert predicted(bounds, 4, "allgather", False) == pytest.approx(2.4 + 2 * 2 + 3.12 + 4.8)
    assert predicted(bounds, 4, "allgather", True) == pytest.approx(2.4 + 4 + 3.12 + 4.8 + 2.4 + 4 + 3 + 9.6)


@pytest.mark.parametrize("scan", ["serial", "allgather"])
def test_seconds_without_boundaries_are_those_of_the_work(scan):
    assert predicted([0, 32, 64], 2, scan, True) == pytest.approx(32 * 3 / 10 + 32 * 3 / 5)


def test_serial_ranks_work_while_they_wait():
    # Rank 0: 48 of sequence 0. Rank 1: its last 16, then sequence 1. The state arrives at 14.4 + 3; by then rank 1
    # has done its 32 own tokens, and 4.8 s remain.
    assert predicted([0, 64, 96], 2, "serial", False) == pytest.approx(14.4 + 3 + 4.8)


def test_a_state_leaves_as_soon_as_its_piece_is_done():
    # Rank 1 does 48 of sequence 1 (14.4 s) and hands on, before it waits for sequence 0 (22.2 s) and does 16 of it.
    # Rank 2 has the state at 17.4 s and does 64 of sequence 1.
    assert predicted([0, 80, 192], 3, "serial", False) == pytest.approx(14.4 + 3 + 19.2)


def test_rounds():
    """With a second a message and nothing else."""
    rates = Rates(forward=1, backward=1, summary=1, bandwidth=float("inf"), latency=1)

    def seconds(scan, ranks):
        return ROUTES[scan].exchange_seconds(crossings(partition(ONE_LONG, ranks), HV, K, V, "f4", False)[0], rates)

    assert [seconds("allgather", ranks) for ranks in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    assert [round(seconds("exscan", ranks)) for ranks in (1, 2, 3, 4, 6, 10)] == [0, 1, 2, 3, 4, 5]
    assert [round(seconds("heads", ranks)) for ranks in (1, 2, 3, 9)] == [0, 1, 2, 2]
    # One head is one part.
    assert [seconds("chain", ranks) for ranks in (1, 2, 3, 9)] == [0, 1, 2, 8]


def test_rates_from_the_command_line(capsys):
    rates = ("--forward-rate", 1e6, "--bandwidth", 1e9, "--latency", 1e-5)
    result = plan(capsys, "--tokens", 4096, "--ranks", 4, *rates)
    assert set(result["scans"]) == set(SCANS)
    work = 4096 * 8 / 1e6
    assert result["scans"]["serial"]["seconds"] > work > result["scans"]["allgather"]["seconds"] > work / 2
    assert main(["plan", "--ranks", "4", *map(str, rates)]) == 0
    assert "predicted seconds" in capsys.readouterr().out
    assert "seconds" not in plan(capsys, "--ranks", 4)["scans"]["serial"]
    assert "--backward-rate: expected a rate" in refused(capsys, "--backward", *rates)
    assert "--bandwidth: expected a rate" in refused(capsys, "--forward-rate", 1)
    assert "--latency: expected a number" in refused(capsys, *rates, "--latency", -1)
    assert "--forward-rate: expected a number" in refused(capsys, *rates, "--forward-rate", "nan")


def test_a_plan_for_many_ranks_says_which_scan_and_what_it_holds(capsys):
    """To 4096 ranks on machines of 8: memory does not grow but for the gather."""
    many = plan(capsys, "--heads", 64, "--tokens", 1 << 22, "--ranks", 4096, "--ranks-per-node", 8, "--backward",
                "--forward-rate", 1e8, "--backward-rate", 5e7, "--bandwidth", 4.5e10, "--latency", 8e-6)
    few = plan(capsys, "--heads", 64, "--tokens", 1 << 22, "--ranks", 8)
    assert many["auto"]["scan"] != "allgather" and "predicted" in many["auto"]["reason"]
    for scan in ("chain", "levels", "exscan", "serial"):
        assert many["scans"][scan]["memory_bytes"] == few["scans"][scan]["memory_bytes"]
    assert many["scans"]["allgather"]["memory_bytes"] > 400 * few["scans"]["allgather"]["memory_bytes"]
    seconds = {scan: row["seconds"] for scan, row in many["scans"].items()}
    assert seconds["serial"] > seconds["chain"] > seconds["levels"]
    assert "ranks_per_node: expected at least 1, got 0" in refused(capsys, "--ranks-per-node", 0)
