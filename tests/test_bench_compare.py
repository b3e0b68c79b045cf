"""`bench compare`: what is called slower, what is refused."""

import copy
import json

import numpy as np
import pytest

from kda_engine.bench.record import make_record
from kda_engine.bench.verdict import AMBIGUOUS, FASTER, SLOWER, WITHIN, judge
from mpi_runner.__main__ import main

CASE = {"what": "forward", "shape": "A", "regime": "weak", "engine": "cuda"}
PROBLEM = {"lengths": [8192], "heads": 96}


def timings(seed, seconds=1e-3, noise=0.03, count=30):
    """Samples as a machine gives them: some scatter, now and then a disturbed one."""
    random = np.random.default_rng(seed)
    disturbed = np.where(random.random(count) < 0.05, 1.5, 1.0)
    return (seconds * (1 + noise * random.exponential(size=count)) * disturbed).tolist()


def record(samples, case=CASE, problem=PROBLEM, machine="one"):
    return make_record("engine", {}, {"name": machine}, {}, [
        {"case": case, "problem": problem, "error": 0.0, "allowed": 1.0, "samples": {"ours": samples}}])


def compare(tmp_path, a, b, *more):
    paths = []
    for name, content in (("a", a), ("b", b)):
        paths.append(str(tmp_path / f"{name}.json"))
        (tmp_path / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return main(["bench", "compare", *paths, *more])


def verdict(before, after, limit=0.05):
    return judge("", {"ours": before}, {"ours": after}, limit)


@pytest.mark.parametrize("seed", range(20))
def test_ten_per_cent_slower_is_called_slower(seed):
    assert verdict(timings(2 * seed), timings(2 * seed + 1, 1.1e-3)).word == SLOWER


@pytest.mark.parametrize("seed", range(20))
def test_two_runs_of_one_build_are_not(seed):
    assert verdict(timings(1000 + 2 * seed), timings(1001 + 2 * seed)).word != SLOWER


@pytest.mark.parametrize("load", [0.7, 1.0, 1.5])
def test_another_load_of_the_machine_changes_neither(load):
    """The second run under another load: its control is as much slower or faster as everything else."""
    for seed in range(10):
        before = {"ours": timings(seed), "control": timings(100 + seed, 5e-3)}
        after = {"ours": timings(200 + seed, load * 1e-3), "control": timings(300 + seed, load * 5e-3)}
        slow = {**after, "ours": timings(400 + seed, 1.1 * load * 1e-3)}
        assert judge("", before, after, 0.05).word != SLOWER
        assert judge("", before, slow, 0.05).word == SLOWER
        assert judge("", before, slow, 0.05).control == pytest.approx(load, rel=0.05)


def test_words():
    a = timings(1)
    assert verdict(a, a).word == AMBIGUOUS
    assert verdict([1.0] * 9, [1.02] * 9).word == WITHIN
    assert verdict([1.0] * 9, [1.08] * 9).word == SLOWER and verdict([1.0] * 9, [1.08] * 9, 0.1).word == WITHIN
    assert verdict([1.0] * 9, [0.9] * 9).word == FASTER


def test_a_slowdown_that_the_samples_do_not_settle_is_ambiguous():
    """Three samples that overlap: slower by a fifth in the median, but it may be chance."""
    assert verdict([1.0, 1.3, 0.9], [1.2, 0.8, 1.4]).word == AMBIGUOUS


def test_the_interval_is_the_same_every_time_and_holds_the_ratio_mostly():
    a, b = timings(1), timings(2, 1.1e-3)
    assert verdict(a, b) == verdict(a, b)
    verdicts = [verdict(timings(i), timings(5000 + i, 1.1e-3)) for i in range(100)]
    assert sum(v.low <= 1.1 <= v.high for v in verdicts) >= 85
    assert all(v.low <= v.ratio <= v.high and v.control == 1 for v in verdicts)


def test_exit_codes(tmp_path, capsys):
    assert compare(tmp_path, record(timings(1)), record(timings(2))) == 0
    assert compare(tmp_path, record(timings(1)), record(timings(2, 1.1e-3)), "--fail-slower", "5%") == 1
    assert "slower" in capsys.readouterr().out.splitlines()[-1]
    assert compare(tmp_path, record(timings(1)), record(timings(2, 1.1e-3)), "--fail-slower", "0.2") == 0
    assert "within the limit" in capsys.readouterr().out


@pytest.mark.parametrize("other, word", [
    (record(timings(1), machine="two"), "machine"),
    (record(timings(1), problem={"lengths": [4096], "heads": 96}), "same problem"),
    ({**record(timings(1)), "mode": "collectives"}, "mode"),
    ({**record(timings(1)), "format_version": 2}, "version 1"),
    ({"format": "something"}, "benchmark record"),
    ("no JSON", "JSON"),
    ("[]", "benchmark record"),
], ids=lambda x: x if isinstance(x, str) and " " not in x else "")
def test_what_cannot_be_compared_is_refused(tmp_path, capsys, other, word):
    assert compare(tmp_path, record(timings(1)), other) == 2
    assert word in capsys.readouterr().err


def test_a_missing_file_and_a_wrong_limit_are_refused(tmp_path, capsys):
    assert main(["bench", "compare", str(tmp_path / "absent.json"), "also-absent.json"]) == 2
    assert compare(tmp_path, record(timings(1)), record(timings(2)), "--fail-slower", "much") == 2
    assert "fail-slower" in capsys.readouterr().err


def test_a_record_from_before_gates_were_named_is_of_the_bounded_one(tmp_path):
    of = lambda gate: record(timings(1), case={"what": "forward", "shape": "A", "regime": "weak", "gate": gate,
                                               "engine": "cuda"})
    assert compare(tmp_path, record(timings(1)), of("lower_bound")) == 0
    assert compare(tmp_path, record(timings(1)), of("softplus")) == 77


def test_nothing_in_common_is_77(tmp_path, capsys):
    assert compare(tmp_path, record(timings(1)), record(timings(1), case={**CASE, "shape": "B"})) == 77
    failed = copy.deepcopy(record(timings(1)))
    del failed["rows"][0]["samples"]
    assert compare(tmp_path, record(timings(1)), failed) == 77
