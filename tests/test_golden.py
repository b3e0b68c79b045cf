"""Goldens: those in data/ are whole and hold for the NumPy engine, and no damaged one is ever taken for good."""

import argparse
import json
import os
import shlex
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

import kda_engine as kda
from kda_engine import cases
from kda_engine.compare import TIERS, TOLERANCES, compare, tolerance_for
from kda_engine.evaluation import evaluate, reference
from kda_engine.hdf5 import golden as golden_file
from kda_engine.hdf5.golden import GoldenError, read_golden, write_golden
from kda_engine.hdf5.inputs import InputFile, write_input
from kda_engine.hdf5.manifest import NAME, check_listed, read_manifest
from kda_engine.hdf5.results import ResultWriter
from kda_engine.hdf5.types import write_json
from mpi_runner import provenance
from mpi_runner.commands import golden as command
from mpi_runner.exit_codes import GOLDEN, MISMATCH, NOTHING_COMPARED, PASS
from mpi_runner.goldens import finding, making, sources, suite

DATA = Path(__file__).resolve().parent.parent / "data"
FILES = sorted(path.name for path in DATA.glob("*.h5"))
ARRAYS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "d_out", "d_final_state")


@pytest.fixture(autouse=True)
def clean_tree(monkeypatch):
    """Goldens are made here from whatever is being worked on."""
    monkeypatch.setattr(making, "uncommitted", lambda: [])


def run(*arguments):
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    args = parser.parse_args(["golden", *map(str, arguments)])
    return args.run(args)


def make(path, name="packed", **given):
    case = cases.make(name, K=4, V=3, **given)
    write_golden(path, case, reference(case), {"commit": "abc"})
    return case


def test_the_manifest_lists_the_folder():
    assert FILES and sorted(read_manifest(DATA)) == FILES
    sizes = {name: (DATA / name).stat().st_size for name in FILES}
    # A head's state of 128 x 128 takes 64 KB, and each of these goldens holds up to four.
    wide = {name for name in FILES if name.startswith("K128-")}
    assert all(size <= (400_000 if name in wide else 200_000) for name, size in sizes.items())
    assert sum(sizes.values()) <= 10 << 20


@pytest.mark.parametrize("file", FILES)
def test_recorded_commands_make_the_same_golden(file, tmp_path, monkeypatch):
    entry = read_manifest(DATA)[file]
    check_listed(DATA / file)
    monkeypatch.chdir(tmp_path)
    program, golden, *arguments = shlex.split(entry.made)
    assert (program, golden) == ("kda-engine", "golden") and run(*arguments) == PASS
    kept, made = read_golden(DATA / file), read_golden(file)
    assert kept.case.options == made.case.options and kept.tolerances == made.tolerances
    for name in ARRAYS:
        x, y = getattr(kept.case, name), getattr(made.case, name)
        assert (x is None) == (y is None) and (x is None or x.tobytes() == y.tobytes()), name
    assert kept.results.keys() == made.results.keys()
    for name, x in kept.results.items():
        # The recurrence is float64; what is stored was rounded once.
        assert compare(made.results[name], x) <= (1e-12 if x.dtype == np.float64 else 1e-7), name


@pytest.mark.parametrize("engine", ["numpy", "reference"])
def test_engines_pass_them_all(engine, capsys):
    assert run("check", "--engine", engine, "--json") == PASS
    told = json.loads(capsys.readouterr().out)
    assert [Path(one["file"]).name for one in told] == FILES
    assert all(one["pass"] and len(one["tensors"]) >= 8 for one in told)


def test_they_cover_the_operator():
    goldens = [read_golden(DATA / name) for name in FILES]
    options = {(g.case.options.gate, g.case.options.beta) for g in goldens}
    assert len(options) == 9
    assert {g.case.v.dtype.name for g in goldens} == {"bfloat16", "float16", "float32", "float64"}
    assert any(g.case.conv is not None for g in goldens) and any(g.case.options.state_layout == "VK" for g in goldens)
    assert any(g.case.v.shape[1] > g.case.q.shape[1] for g in goldens)
    assert any(g.case.v.shape[2] != g.case.q.shape[2] for g in goldens)
    assert any((np.diff(g.case.cu_seqlens) == 0).any() for g in goldens)
    # What kernels are tuned for.
    tuned = [g for g in goldens if g.case.k.shape[2] == g.case.v.shape[2] == 128]
    assert {g.case.options.gate for g in tuned} == {"lower_bound", "softplus", "log"}
    assert {g.case.v.dtype.name for g in tuned} == {"bfloat16", "float16", "float32"}
    assert any(g.case.v.shape[1] > g.case.q.shape[1] for g in tuned) and any(len(g.case.cu_seqlens) > 2 for g in tuned)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_golden_comes_back(tmp_path, dtype):
    case = make(tmp_path / "g.h5", "conv", dtype=dtype)
    golden = read_golden(tmp_path / "g.h5")
    for name in ARRAYS:
        assert getattr(golden.case, name).tobytes() == getattr(case, name).tobytes()
    expected = reference(case)
    assert golden.results.keys() == expected.keys() and "grads/conv/dk_weight" in expected
    for name, x in expected.items():
        assert golden.results[name].tobytes() == np.ascontiguousarray(x).tobytes()
        assert x.dtype == ("f8" if dtype == "float64" else "f4")
    assert golden.provenance == {"commit": "abc"} and golden.case.name == "conv"
    assert golden.tier == ("bf16" if dtype == "bfloat16" else "tight")
    with InputFile(tmp_path / "g.h5") as file:
        assert file.T == len(case.q)


def test_reference_results_are_those_of_wide_inputs():
    case = cases.make("packed", dtype="bfloat16")
    wide = {name: getattr(case, name).astype("f8") for name in ARRAYS}
    exact = evaluate(replace(case, **wide), "reference")
    for name, x in reference(case).items():
        # Rounding to float32 at the end, not to bfloat16 on the way.
        assert compare(x, exact[name]) <= 1e-7, name
    assert compare(evaluate(case, "reference")["outputs/out"], exact["outputs/out"]) > 1e-4


def test_a_golden_of_an_input_file(tmp_path):
    case = cases.make("packed")
    write_input(tmp_path / "in.h5", q=case.q, k=case.k, v=case.v, g=case.g, beta=case.beta,
                cu_seqlens=case.cu_seqlens, options=case.options)
    assert run("new", tmp_path / "in.h5", tmp_path / "g.h5") == PASS
    golden = read_golden(tmp_path / "g.h5")
    # Without d_out there are no gradients to keep.
    assert list(golden.results) == ["outputs/out", "outputs/final_state"] and golden.case.A_log is None
    assert run("check", "--engine", "numpy", tmp_path / "g.h5") == PASS
    with pytest.raises(kda.InputError, match="--K"):
        run("new", tmp_path / "in.h5", tmp_path / "other.h5", "--K", 4)


def test_new_keeps_the_manifest_and_existing_files(tmp_path):
    (tmp_path / NAME).touch()
    assert run("new", "packed", tmp_path / "g.h5", "--K", 4, "--dtype", "float64") == PASS
    entry = read_manifest(tmp_path)["g.h5"]
    assert entry.case == "packed" and entry.made == "kda-engine golden new packed g.h5 --dtype=float64 --K=4"
    before = (tmp_path / "g.h5").read_bytes()
    with pytest.raises(kda.InputError, match="force"):
        run("new", "packed", tmp_path / "g.h5")
    assert (tmp_path / "g.h5").read_bytes() == before
    assert run("new", "packed", tmp_path / "g.h5", "--force") == PASS
    check_listed(tmp_path / "g.h5")
    with pytest.raises(kda.InputError, match="case"):
        run("new", "no-such-case", tmp_path / "h.h5")


def test_list_names_what_goldens_hold(capsys):
    assert run("list") == PASS
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == FILES and last == f"{len(FILES)} goldens in {DATA}"
    assert any("gate=softplus" in line and "float64" in line for line in lines)


def test_a_wrong_engine_is_found(tmp_path, monkeypatch, capsys):
    make(tmp_path / "g.h5")
    right = evaluate

    def check_with(change):
        def wrong(case, engine):
            results = right(case, engine)
            change(results)
            return results
        monkeypatch.setattr(sources, "evaluate", wrong)
        code = run("check", "--engine", "numpy", tmp_path / "g.h5")
        return code, [line.split()[0] for line in capsys.readouterr().out.splitlines() if "FAIL" in line]

    assert check_with(lambda results: None) == (PASS, [])
    for name in reference(cases.make("packed")):
        off = lambda results: results.update({name: results[name] * np.float32(1.001)})
        assert check_with(off) == (MISMATCH, [name])
        assert check_with(lambda results: results[name].ravel().put(0, np.nan)) == (MISMATCH, [name])
        assert check_with(lambda results: results.pop(name)) == (MISMATCH, [name])
        assert check_with(lambda results: results.update({name: results[name][:-1]})) == (MISMATCH, [name])


def edit(change):
    def damage(path):
        with h5py.File(path, "r+") as file:
            change(file)
    return damage


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def overwrite(name):
    def change(file):
        x = file[name][()]
        x.ravel()[0] += 1
        file[name][...] = x
    return edit(change)


DAMAGES = {
    "missing": (lambda path: path.unlink(), "got nothing"),
    "empty": (lambda path: path.write_bytes(b""), "empty"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-1000]), "truncated"),
    "LFS pointer": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"), "LFS"),
    "version": (edit(lambda f: f.attrs.__setitem__("format_version", 2)), "format_version: expected 1, got 2"),
    "kind": (edit(lambda f: f.attrs.__setitem__("kind", "output")), "kind"),
    "tolerance": (edit(lambda f: f["tolerances"].attrs.__setitem__("tight", 0.5)), "/tolerances"),
    "added tolerance": (edit(lambda f: f["tolerances"].attrs.__setitem__("loose", 0.5)), "/tolerances"),
    "output": (overwrite("outputs/out"), "/outputs/out"),
    "gradient": (overwrite("grads/dA_log"), "/grads/dA_log"),
    "input": (overwrite("inputs/g"), "/inputs/g"),
    "bounds": (edit(lambda f: f["inputs/cu_seqlens"].__setitem__(1, 32)), "cu_seqlens"),
    "option": (edit(lambda f: f["inputs"].attrs.__setitem__("lower_bound", -4.0)), "options"),
    "tensor left out": (edit(lambda f: f.__delitem__("grads/dk")), "/grads/dk"),
    "no checksums": (edit(lambda f: f.__delitem__("checksums")), "got nothing"),
    "other checksums": (edit(lambda f: (f.__delitem__("checksums"), write_json(f, "checksums/json", [1]))), "readable"),
    "no report": (edit(lambda f: f.__delitem__("report")), "report"),
    "flipped bit": (flip, None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_goldens_are_told_from_wrong_engines(tmp_path, capsys, damage):
    spoil, message = DAMAGES[damage]
    path = tmp_path / "g.h5"
    make(path)
    spoil(path)
    with pytest.raises(GoldenError, match=message) as refusal:
        read_golden(path)
    assert str(path) in str(refusal.value)
    before = sorted(os.listdir(tmp_path))
    assert run("check", "--engine", "numpy", path) == GOLDEN
    assert str(path) in capsys.readouterr().err and sorted(os.listdir(tmp_path)) == before


def test_every_flipped_bit_is_noticed_or_harmless(tmp_path):
    path = tmp_path / "g.h5"
    case = make(path, "tokens-1")
    good, expected = path.read_bytes(), reference(case)
    random = np.random.default_rng(0)
    for place in random.choice(len(good), 300, replace=False):
        content = bytearray(good)
        content[place] ^= 1 << int(random.integers(8))
        path.write_bytes(content)
        try:
            golden = read_golden(path)
        except GoldenError:
            continue
        # The bit lay where no value is: padding, or the provenance.
        assert all(np.array_equal(golden.results[name], x) for name, x in expected.items())
        assert all(np.array_equal(getattr(golden.case, name), getattr(case, name)) for name in ARRAYS)


def test_an_output_is_no_golden(tmp_path):
    with ResultWriter(tmp_path / "out.h5") as writer:
        writer.finish({}, {})
    with pytest.raises(GoldenError, match="kind"):
        read_golden(tmp_path / "out.h5")


def test_another_golden_under_a_listed_name_is_refused(tmp_path, capsys):
    for name in (NAME, FILES[0]):
        shutil.copy(DATA / name, tmp_path)
    assert run("check", "--engine", "numpy", tmp_path / FILES[0]) == PASS
    shutil.copy(DATA / FILES[1], tmp_path / FILES[0])
    assert run("check", "--engine", "numpy", tmp_path / FILES[0]) == GOLDEN
    assert NAME in capsys.readouterr().err


def test_one_bad_golden_among_good_ones(tmp_path, capsys):
    make(tmp_path / "a.h5")
    assert run("check", "--engine", "numpy", tmp_path / "a.h5", tmp_path / "b.h5") == GOLDEN
    shown = capsys.readouterr()
    assert "b.h5" in shown.err and "a.h5: packed" in shown.out


def test_nothing_compared_is_not_a_pass(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(finding, "_PLACES", [tmp_path / "none", tmp_path])
    for action in ("check", "list", "upgrade"):
        assert run(action) == NOTHING_COMPARED
        assert f"no goldens in {tmp_path}" in capsys.readouterr().err
    with pytest.raises(kda.InputError, match="expected a folder with goldens, got one without any .h5 file"):
        run("list", tmp_path)


def test_a_name_alone_is_one_that_came_along(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run("list", "ragged.h5") == PASS
    assert run("list", "none.h5") == GOLDEN
    make(tmp_path / "ragged.h5")
    capsys.readouterr()
    # One's own comes first.
    assert run("list", "ragged.h5") == PASS and "packed" in capsys.readouterr().out


def test_a_folder_stands_for_its_goldens(tmp_path, capsys):
    make(tmp_path / "b.h5")
    make(tmp_path / "a.h5")
    assert run("list", tmp_path) == PASS
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["a.h5", "b.h5"]
    assert run("check", "--engine", "numpy", tmp_path) == PASS
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 goldens pass"


SMALL = ("--K", 3, "--V", 2, "--heads", 1, "--tokens", 24, "--dtype", "float64")


def test_a_suite_is_every_case_at_the_given_sizes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cases, "RECIPES", {name: recipe for name, recipe in cases.RECIPES.items() if name in
                                           ("ordinary", "tokens-17", "packed", "no-states", "grouped-heads", "conv",
                                            "odd-sizes", "wide-keys", "empty-middle", "relay", "thousands")})
    folder = tmp_path / "suite"
    assert run("suite", folder, *SMALL, "--seed", 3) == PASS
    assert capsys.readouterr().out.splitlines()[-1] == f"{folder}: 9 goldens"
    made = {path.stem: read_golden(path).case for path in folder.glob("*.h5")}
    # Cases that are about other head counts and sizes would be the ordinary one again.
    assert set(made) == set(cases.RECIPES) - {"odd-sizes", "wide-keys"}
    assert all(case.k.shape[1:] == (1, 3) and case.v.shape[2] == 2 and case.v.dtype == "f8" for case in made.values())
    assert made["grouped-heads"].v.shape[1] == 2
    lengths = {name: case.lengths.tolist() for name, case in made.items()}
    assert lengths["tokens-17"] == [17] and lengths["packed"] == [33, 16, 48, 5]
    assert lengths["empty-middle"] == [20, 0, 17]
    assert lengths["ordinary"] == [24] and lengths["no-states"] == [9, 15] and lengths["conv"] == [10, 1, 0, 13]
    assert run("check", "--engine", "numpy", folder) == PASS
    entry = read_manifest(folder)["no-states.h5"]
    assert entry.made == ("kda-engine golden new no-states no-states.h5 --dtype=float64 --seed=3 --heads=1 --K=3 --V=2 "
                          "--lengths=9,15")
    monkeypatch.chdir(tmp_path)
    assert run(*shlex.split(entry.made)[2:]) == PASS
    again = read_golden("no-states.h5")
    assert again.case.k.tobytes() == made["no-states"].k.tobytes()


def test_a_suite_keeps_what_is_there(tmp_path, capsys):
    (tmp_path / "ordinary.h5").touch()
    with pytest.raises(kda.InputError, match="ordinary.h5: exists"):
        run("suite", tmp_path, *SMALL)
    assert os.listdir(tmp_path) == ["ordinary.h5"]
    with pytest.raises(kda.InputError, match="--value-heads: expected together with --heads"):
        run("suite", tmp_path, "--value-heads", 4)
    with pytest.raises(kda.InputError, match="--tokens: expected at least 1, got 0"):
        run("suite", tmp_path, "--tokens", 0)


def test_no_two_goldens_of_a_suite_are_one_problem():
    names = [name for name, _ in suite.plan({"K": 128, "V": 128, "heads": 2, "value_heads": 2, "dtype": "bfloat16"})]
    assert "grouped-heads" not in names and "one-channel" not in names and "K128" not in names
    assert len([name for name, _ in suite.plan({})]) == len(cases.names())


def test_an_unreadable_manifest_is_a_bad_golden(tmp_path):
    make(tmp_path / "g.h5")
    (tmp_path / NAME).write_text("[[golden]\nfile=")
    with pytest.raises(GoldenError, match=NAME):
        check_listed(tmp_path / "g.h5")


def test_the_tolerances_of_a_golden_are_the_tables():
    for file, tolerance in (("ordinary.h5", TOLERANCES["f4"]), ("ordinary-float64.h5", TOLERANCES["f8"])):
        golden = read_golden(DATA / file)
        assert golden.tolerance == golden.tolerances["tight"] == tolerance and golden.tolerances["bitwise"] == 0
        assert golden.tolerances["bf16"] == tolerance_for("bfloat16")
    half = read_golden(DATA / "ordinary-float16.h5")
    assert half.tier == "bf16" and half.tolerance == tolerance_for("float16")
    assert half.tolerances["tight"] == TOLERANCES["f4"]


def older_form(path, monkeypatch):
    """A golden as they were before there were tiers: the tolerance of its own type alone."""
    with monkeypatch.context() as patch:
        patch.setattr(golden_file, "tolerances_of", lambda *of: {"tight": TOLERANCES["f4"]})
        return make(path)


def test_upgrade_adds_what_an_older_form_lacks(tmp_path, monkeypatch, capsys):
    path = tmp_path / "g.h5"
    case = older_form(path, monkeypatch)
    with pytest.raises(GoldenError, match="older form.*golden upgrade"):
        read_golden(path)
    assert run("check", "--engine", "numpy", path) == GOLDEN
    (tmp_path / NAME).write_text(f'[[golden]]\nfile = "g.h5"\nsha256 = "0"\ncase = "packed"\nmade = "by hand"\n')
    capsys.readouterr()
    assert run("upgrade", path) == PASS and capsys.readouterr().out == f"{path}: upgraded\n"
    check_listed(path)
    assert read_manifest(tmp_path)["g.h5"].made == "by hand"
    golden, expected = read_golden(path), reference(case)
    assert sorted(golden.tolerances) == sorted(TIERS) and golden.provenance == {"commit": "abc"}
    assert all(golden.results[name].tobytes() == x.tobytes() for name, x in expected.items())
    before = path.read_bytes()
    assert run("upgrade", path) == PASS and "up to date" in capsys.readouterr().out
    assert path.read_bytes() == before


def test_upgrade_leaves_a_damaged_golden_as_it_is(tmp_path, monkeypatch):
    path = tmp_path / "g.h5"
    older_form(path, monkeypatch)
    flip(path)
    before = path.read_bytes()
    assert run("upgrade", path) == GOLDEN and path.read_bytes() == before
    assert run("upgrade", tmp_path / "none.h5") == GOLDEN


def test_new_says_what_it_changes(tmp_path, capsys):
    path = tmp_path / "g.h5"
    assert run("new", "packed", path) == PASS
    with pytest.raises(kda.InputError, match="(?s)--force replaces it.*nothing: the same inputs"):
        run("new", "packed", path)
    with pytest.raises(kda.InputError, match="(?s)inputs/q: relative change .*outputs/out: relative change"):
        run("new", "packed", path, "--seed", 1)
    with pytest.raises(kda.InputError, match=r"(?s)beta: logit -> value.*name: packed -> log-value"):
        run("new", "log-value", path)
    capsys.readouterr()
    assert run("new", "packed", path, "--K", 4, "--force") == PASS
    assert "inputs/q: float32 (102, 2, 16) -> float32 (102, 2, 4)" in capsys.readouterr().out


def test_a_dirty_tree_makes_no_golden(tmp_path, monkeypatch):
    monkeypatch.setattr(making, "uncommitted", lambda: ["kda_engine/gate.py"])
    with pytest.raises(kda.InputError, match="uncommitted changes.*kda_engine/gate.py"):
        run("new", "packed", tmp_path / "g.h5")
    assert not (tmp_path / "g.h5").exists()


def test_what_makes_a_tree_dirty(tmp_path, monkeypatch):
    git = lambda *words: subprocess.run(["git", "-C", tmp_path, "-c", "user.name=n", "-c", "user.email=e", *words],
                                        check=True, capture_output=True)
    monkeypatch.setattr(provenance, "ROOT", str(tmp_path))
    (tmp_path / "kda_engine").mkdir()
    (tmp_path / "kda_engine" / "gate.py").write_text("a")
    assert provenance.uncommitted() == [] and provenance.commit() is None
    git("init")
    assert provenance.uncommitted() == ["kda_engine/"]
    git("add", ".")
    git("commit", "-m", "x")
    assert provenance.uncommitted() == [] and len(provenance.commit()) == 40
    (tmp_path / "notes.txt").write_text("no part of the program")
    assert provenance.uncommitted() == []
    (tmp_path / "kda_engine" / "gate.py").write_text("b")
    assert provenance.uncommitted() == ["kda_engine/gate.py"]
