"""The error metric, and `compare` on files."""

import argparse
import json

import numpy as np
import pytest

import kda_engine as kda
from kda_engine.arrays import BFLOAT16
from kda_engine.compare import (TIERS, Comparison, block_starts, compare, difference, first_bad, tier_of, tolerance_for,
                                tolerances_of)
from kda_engine.hdf5 import matching
from kda_engine.hdf5.results import ResultFile, ResultWriter
from mpi_runner.commands import compare as command
from mpi_runner.exit_codes import MISMATCH, NOTHING_COMPARED, PASS


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_metric_is_the_relative_frobenius_norm():
    a, b = normal(7, 3, 5), normal(7, 3, 5, seed=1)
    expected = np.linalg.norm(a - b) / np.linalg.norm(b)
    assert abs(compare(a, b) - expected) <= 1e-15 * expected
    assert compare(a, a) == 0
    assert abs(compare(a, np.zeros_like(a)) / (np.linalg.norm(a) / 1e-30) - 1) <= 1e-12


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_squares_do_not_leave_the_range(scale):
    a, b = normal(40, 2), normal(40, 2, seed=1)
    if scale < 1:
        # The floor under the norm of b takes over long before; equal ratios are only asked for above it.
        assert 0 < compare(a * scale, b * scale) < 1e-100
    else:
        assert abs(compare(a * scale, b * scale) / compare(a, b) - 1) <= 1e-14


def test_zero_and_empty_agree():
    assert compare(np.zeros(3), np.zeros(3)) == 0
    assert compare(np.empty((0, 2, 4)), np.empty((0, 2, 4))) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_never_passes(bad):
    a, b = normal(4, 2, 3), normal(4, 2, 3)
    a[2, 1, 0] = bad
    found = difference(a, b)
    assert not found.within(1e300) and not compare(a, b) <= 1e300
    assert found.nonfinite == 1 and found.first_nonfinite == (2, 1, 0)
    # Not even against itself, or when it is the reference that is bad.
    assert not difference(a, a).within(1e300) and not difference(b, a).within(1e300)


def test_shapes_that_differ_never_pass():
    assert not difference(normal(4, 2), normal(4, 3)).within(1e300)
    assert np.isnan(kda.compare(normal(4), normal(4, 1)))


def test_narrow_types_are_compared_exactly():
    a = normal(50, 2).astype(BFLOAT16)
    assert compare(a, a.astype("f8")) == 0
    assert 0 < compare(a, normal(50, 2)) < 3e-3


def test_slabs_add_up_to_the_whole():
    a, b = normal(300, 3, 4), normal(300, 3, 4, seed=1)
    starts = block_starts([0, 10, 10, 200, 300])
    whole, slabs = difference(a, b, starts), Comparison()
    for first, last in ((0, 74), (74, 138), (138, 264), (264, 300)):
        inside = starts[(starts >= first) & (starts < last)]
        slabs.add(a[first:last], b[first:last], first, inside - first)
    slabs = slabs.result()
    for field in ("relative", "peak", "worst"):
        assert abs(getattr(slabs, field) / getattr(whole, field) - 1) <= 1e-13
    assert slabs.worst_at == whole.worst_at
    assert abs(whole.peak - np.max(abs(a - b)) / np.max(abs(b))) <= 1e-15


def test_blocks_are_counted_from_each_sequence():
    assert block_starts([0, 10, 10, 139, 140]).tolist() == [0, 10, 74, 138, 139]
    assert block_starts([0]).tolist() == []


def test_a_wrong_block_is_found_where_it_is():
    b = normal(140, 3, 4)
    # Head 2 is small: the whole tensor's norm hides that one of its blocks is all wrong.
    b[:, 2] *= 1e-6
    a = b.copy()
    a[74:138, 2] *= 2
    found = difference(a, b, block_starts([0, 10, 139, 140]))
    assert found.relative < 1e-5 and abs(found.worst - 1) <= 1e-12 and found.worst_at == (74, 2)
    place = matching.place("grads/dq", found.worst_at, np.array([0, 10, 139, 140]))
    assert place == "sequence 1, head 2, tokens from 64"


def test_a_block_of_zeros_is_measured_against_the_others():
    b = normal(128, 1, 4)
    b[64:] = 0
    a = b.copy()
    a[64:] = 1e-9
    assert difference(a, b, block_starts([0, 128])).worst < 1e-2


def test_tolerances_follow_the_type():
    assert [tolerance_for(t) for t in ("f8", "f4", BFLOAT16)] == [1e-11, 2e-5, 3e-3]
    assert tolerance_for("f4", repeated_keys=True) == 1e-3 and tolerance_for("f4", convolved=True) == 2e-5
    assert tolerance_for(BFLOAT16, convolved=True) == 12e-3


def write(path, tensors):
    with ResultWriter(path) as writer:
        for name, x in tensors.items():
            writer.create(name, x.shape, x.dtype)
            writer.write(name, 0, x)
        writer.finish({"cu_seqlens": [0, 30, 200]}, {})
    return str(path)


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    args = parser.parse_args(["compare", *arguments])
    return args.run(args)


def tensors(dtype="f4"):
    return {"outputs/out": normal(200, 2, 4).astype(dtype), "outputs/final_state": normal(2, 2, 4, 4).astype("f4"),
            "grads/dA_log": normal(2).astype("f4")}


def test_equal_files_pass(tmp_path, capsys):
    a, b = write(tmp_path / "a.h5", tensors()), write(tmp_path / "b.h5", tensors())
    assert run(a, b) == PASS
    table = capsys.readouterr().out
    assert table.count(" ok") == 3 and "FAIL" not in table


@pytest.mark.parametrize("name", tensors())
def test_a_difference_in_any_tensor_fails(tmp_path, capsys, name):
    a, b = tensors(), write(tmp_path / "b.h5", tensors())
    a[name] = a[name] * np.float32(1 + 1e-4)
    a = write(tmp_path / "a.h5", a)
    assert run(a, b) == MISMATCH
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "FAIL" in line] == [name]
    assert run(a, b, "--tolerance", "1e-3") == PASS
    assert run(a, b, "--tolerance", "0") == MISMATCH


def test_the_worst_block_is_named(tmp_path, capsys, monkeypatch):
    # Slabs of a block or two, as for tensors that do not fit.
    monkeypatch.setattr(matching, "SLAB_BYTES", 8 * 8 * 50)
    a, b = tensors(), write(tmp_path / "b.h5", tensors())
    a["outputs/out"][160:170, 1] += 1
    assert run(write(tmp_path / "a.h5", a), b) == MISMATCH
    assert "sequence 1, head 1, tokens from 128" in capsys.readouterr().out


def test_nan_and_missing_and_misshapen_tensors_fail(tmp_path, capsys):
    b = write(tmp_path / "b.h5", tensors())
    bad = tensors()
    bad["outputs/out"][7, 1, 2] = np.nan
    assert run(write(tmp_path / "nan.h5", bad), b, "--tolerance", "1e9") == MISMATCH
    assert "1 values not finite, the first at (7, 1, 2)" in capsys.readouterr().out
    few = tensors()
    del few["grads/dA_log"]
    few = write(tmp_path / "few.h5", few)
    assert run(few, b) == MISMATCH and run(b, few) == MISMATCH
    assert f"absent in {few}" in capsys.readouterr().out
    short = tensors() | {"outputs/out": normal(199, 2, 4).astype("f4")}
    assert run(write(tmp_path / "short.h5", short), b) == MISMATCH
    assert "shape (199, 2, 4) against (200, 2, 4)" in capsys.readouterr().out


def test_json_and_single_tensors(tmp_path, capsys):
    a, b = tensors(), write(tmp_path / "b.h5", tensors())
    a["outputs/out"][160:170, 1] += 1
    del a["grads/dA_log"]
    a = write(tmp_path / "a.h5", a)
    assert run(a, b, "--json") == MISMATCH
    told = json.loads(capsys.readouterr().out)
    assert (told["a"], told["b"], told["pass"]) == (a, b, False)
    out, state, lost = told["tensors"]
    assert (out["tensor"], out["where"], out["pass"]) == ("outputs/out", "sequence 1, head 1, tokens from 128", False)
    assert out["error"] > out["tolerance"] == 2e-5 and state["pass"] and state["error"] == 0
    assert lost == {"tensor": "grads/dA_log", "why": f"absent in {a}", "pass": False}
    assert run(a, b, "--only", "final_state") == PASS
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["tensor", "outputs/final_state"]
    assert run(a, b, "--only", "outputs/final_state", "--only", "out", "--json") == MISMATCH
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 2
    # What one file alone has is not lost from sight, nor is it a pass.
    assert run(a, b, "--only", "dA_log") == NOTHING_COMPARED
    with pytest.raises(kda.InputError, match="--only: expected a tensor of either file, got dA_lg: did you mean dA_log"):
        run(a, b, "--only", "dA_lg")


def test_a_picture_of_one_tensor(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    a, b = write(tmp_path / "a.h5", tensors()), write(tmp_path / "b.h5", tensors())
    for name in ("outputs/out", "outputs/final_state", "grads/dA_log"):
        picture = tmp_path / f"{name.rpartition('/')[2]}.png"
        assert run(a, b, "--only", name, "--plot", str(picture)) == PASS
        assert picture.read_bytes().startswith(b"\x89PNG") and f"wrote {picture}" in capsys.readouterr().out
    with pytest.raises(kda.InputError, match="none/x.png: cannot be written"):
        run(a, b, "--plot", str(tmp_path / "none" / "x.png"))


def test_nothing_in_common_is_not_a_pass(tmp_path):
    a = write(tmp_path / "a.h5", {"outputs/out": normal(4, 1, 2)})
    b = write(tmp_path / "b.h5", {"grads/dq": normal(4, 1, 2)})
    assert run(a, b) == NOTHING_COMPARED


def test_the_narrowest_type_sets_the_tolerance(tmp_path):
    a, b = write(tmp_path / "a.h5", tensors(BFLOAT16)), write(tmp_path / "b.h5", tensors("f8"))
    assert run(a, b) == PASS
    with ResultFile(a) as file:
        assert file.cu_seqlens.tolist() == [0, 30, 200]


def test_a_tolerance_that_is_no_number_is_refused(tmp_path):
    a = write(tmp_path / "a.h5", tensors())
    for tolerance in ("-1", "nan"):
        with pytest.raises(kda.InputError, match="tolerance"):
            run(a, a, f"--tolerance={tolerance}")


def test_the_first_bad_value():
    b = normal(5, 2, 3)
    b[4, 1, 2] = 10
    a = b.copy()
    assert first_bad(a, b, 0.0) is None and first_bad(a[:0], b[:0], 0.0) is None
    # The limit is a share of the largest value: 0.01 of 10.
    a[1, 0, 2] += 0.0999
    assert first_bad(a, b, 0.01) is None
    a[3, 1, 0] -= 0.1001
    assert first_bad(a, b, 0.01) == (3, 1, 0)
    a[2, 0, 1] = np.nan
    assert first_bad(a, b, 0.01) == (2, 0, 1)


def test_tiers():
    assert tier_of("float32", BFLOAT16) == tier_of("float16") == "bf16" and tier_of("float32", "float64") == "tight"
    for dtype in ("float64", "float32", "float16", BFLOAT16):
        for repeated in (False, True):
            found = tolerances_of(dtype, repeated)
            assert tuple(found) == TIERS and found["bitwise"] == 0
            assert found[tier_of(dtype)] == tolerance_for(dtype, repeated)
    assert tolerances_of("float32")["bf16"] == tolerance_for(BFLOAT16)
    assert tolerances_of("float16")["tight"] == tolerance_for("float32")


def test_blocks_are_those_of_the_difference():
    b = normal(10, 2, 3)
    a = b.copy()
    a[4:7, 1] *= 1.5
    comparison = Comparison()
    comparison.add(a, b, starts=[0, 4, 7])
    rows, errors = comparison.blocks()
    assert rows.tolist() == [0, 4, 7] and errors.shape == (3, 2)
    assert errors[1, 1] == pytest.approx(0.5) == comparison.result().worst and np.count_nonzero(errors) == 1
    assert Comparison().blocks() is None
