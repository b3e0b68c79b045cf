"""`golden check`: results made elsewhere and over ranks, tiers, and the reports for CI systems and people."""

import argparse
import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import h5py
import numpy as np
import pytest
from launcher import launch

import kda_engine as kda
from kda_engine import cases
from kda_engine.engines.host import HostEngine
from kda_engine.evaluation import evaluate, reference
from kda_engine.hdf5.golden import read_golden, write_golden
from kda_engine.hdf5.results import write_results
from mpi_runner.__main__ import main
from mpi_runner.commands import golden as command
from mpi_runner.exit_codes import GOLDEN, MISMATCH, NOTHING_COMPARED, PASS, USAGE
from mpi_runner.goldens import heat_map, judging, sources
from mpi_runner.goldens.heat_map import write_heat_map

DATA = Path(__file__).resolve().parent.parent / "data"


def check(*arguments):
    parser = argparse.ArgumentParser()
    command.add(parser.add_subparsers())
    args = parser.parse_args(["golden", "check", *map(str, arguments)])
    return args.run(args)


@pytest.fixture
def made(tmp_path):
    """A golden of one case, and what the NumPy engine makes of it."""
    case = cases.make("packed", K=4, V=3)
    write_golden(tmp_path / "g.h5", case, reference(case), {})
    return tmp_path / "g.h5", evaluate(case, "numpy")


def judged(golden, results, capsys):
    """(exit code, tensors that failed) of an output file with these results."""
    output = golden.parent / "out.h5"
    write_results(output, results, {"made": "elsewhere"}, force=True)
    capsys.readouterr()
    code = check("--output", output, golden)
    return code, [line.split()[0] for line in capsys.readouterr().out.splitlines() if "FAIL" in line]


def test_an_output_made_elsewhere(made, capsys):
    golden, results = made
    assert judged(golden, results, capsys) == (PASS, [])
    for name, x in results.items():
        nan = x.copy()
        nan.ravel()[-1] = np.nan
        assert judged(golden, {**results, name: nan}, capsys) == (MISMATCH, [name])
        assert judged(golden, {**results, name: x * np.float32(1.001)}, capsys) == (MISMATCH, [name])
        assert judged(golden, {**results, name: x[:-1]}, capsys) == (MISMATCH, [name])
    without = {name: x for name, x in results.items() if name != "grads/dk"}
    assert judged(golden, without, capsys) == (MISMATCH, ["grads/dk"])


def test_an_output_written_with_h5py_alone(made, capsys):
    golden, results = made
    with h5py.File(golden.parent / "bare.h5", "w") as file:
        for name, x in results.items():
            file[name] = x
    assert check("--output", golden.parent / "bare.h5", golden) == PASS
    with h5py.File(golden.parent / "bare.h5", "r+") as file:
        file["grads/dk"][3, 1, 2] += 1
    assert check("--output", golden.parent / "bare.h5", golden) == MISMATCH
    assert main(["compare", str(golden.parent / "bare.h5"), str(golden)]) == MISMATCH
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines() if "FAIL" in line] == ["grads/dk"] * 2


def test_a_folder_of_outputs(made, tmp_path, capsys):
    golden, results = made
    goldens, outputs = tmp_path / "goldens", tmp_path / "outputs"
    goldens.mkdir(), outputs.mkdir()
    for name in ("a.h5", "b.h5", "c.h5", "d.h5"):
        (goldens / name).write_bytes(golden.read_bytes())
    write_results(outputs / "a.h5", results, {})
    write_results(outputs / "b.h5", results | {"grads/dk": results["grads/dk"] * np.float32(1.1)}, {})
    assert check("--outputs", outputs, goldens) == MISMATCH
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{goldens / 'a.h5'}: packed, {outputs / 'a.h5'}, tier tight")
    assert lines[0].endswith("ok")
    assert [line.split()[0] for line in lines if "FAIL" in line] == ["grads/dk"]
    assert f"{goldens / 'c.h5'}: packed, {outputs / 'c.h5'}: not compared: there is no such file" in lines
    assert lines[-1] == "1 of 4 goldens pass, 2 were not compared"
    (outputs / "b.h5").write_bytes(b"no HDF5")
    assert check("--outputs", outputs, goldens) == MISMATCH
    assert "expected an HDF5 file, got something else" in capsys.readouterr().out
    (outputs / "b.h5").unlink()
    assert check("--outputs", outputs, goldens) == PASS
    (outputs / "a.h5").rename(outputs / "aa.h5")
    with pytest.raises(kda.InputError, match="aa.h5: expected the name of a golden"):
        check("--outputs", outputs, goldens)
    assert check("--outputs", outputs, goldens / "a.h5") == NOTHING_COMPARED
    with pytest.raises(kda.InputError, match="--outputs: expected a folder"):
        check("--outputs", outputs / "aa.h5", goldens)


def test_a_forward_alone_is_judged_as_one(made, capsys):
    golden, results = made
    outputs = {name: x for name, x in results.items() if name.startswith("outputs/")}
    write_results(golden.parent / "out.h5", outputs, {})
    assert check("--output", golden.parent / "out.h5", golden) == PASS
    assert "holds no gradients; 8 of the golden's were not looked at" in capsys.readouterr().out
    assert judged(golden, {"outputs/out": results["outputs/out"]}, capsys) == (MISMATCH, ["outputs/final_state"])


def test_an_engine_of_our_own_has_to_give_gradients(made, monkeypatch, capsys):
    golden, results = made
    outputs = {name: x for name, x in results.items() if name.startswith("outputs/")}
    monkeypatch.setattr(sources, "evaluate", lambda case, engine: outputs)
    assert check("--engine", "numpy", golden) == MISMATCH
    assert capsys.readouterr().out.count("absent in the results of engine numpy") == 8


def test_16_bit_results_are_judged_as_such(made, capsys):
    golden, results = made
    rounded = {name: x.astype("bfloat16") if name == "outputs/out" else x for name, x in results.items()}
    assert judged(golden, rounded, capsys) == (PASS, [])
    assert check("--tier", "tight", "--output", golden.parent / "out.h5", golden) == MISMATCH


def test_bitwise_takes_nothing_but_the_same_bits(made, capsys):
    golden, _ = made
    results = read_golden(golden).results
    tiers = lambda results: [write_results(golden.parent / "out.h5", results, {}, force=True),
                             check("--tier", "bitwise", "--output", golden.parent / "out.h5", golden)][1]
    assert tiers(results) == PASS
    assert tiers({name: x.astype("bfloat16") for name, x in results.items()}) == PASS
    off = results["grads/dq"].copy()
    off[-1, -1, -1] = np.nextafter(off[-1, -1, -1], np.float32(9))
    capsys.readouterr()
    assert tiers({**results, "grads/dq": off}) == MISMATCH
    assert f"first bad value at {tuple(n - 1 for n in off.shape)}" in capsys.readouterr().out
    assert check("--tier", "bitwise", "--engine", "reference", golden) == PASS


def test_what_cannot_be_judged(made):
    golden, results = made
    output = golden.parent / "out.h5"
    with pytest.raises(kda.InputError, match="none.h5: expected an HDF5 file, got nothing"):
        check("--output", golden.parent / "none.h5", golden)
    write_results(output, results, {})
    with pytest.raises(kda.InputError, match="expected one golden to judge it by, got 0"):
        check("--output", output)
    assert check("--output", output, golden.parent / "none.h5") == GOLDEN


def test_many_goldens_are_a_line_each_and_a_table_where_one_fails(made, capsys):
    golden, results = made
    files = [golden.parent / name for name in ("a.h5", "b.h5", "c.h5")]
    case = read_golden(golden).case
    for path, factor in zip(files, (1, 1.5, 1)):
        changed = {"grads/dk": results["grads/dk"] * np.float32(factor)}
        write_golden(path, case, read_golden(golden).results | changed, {})
    assert check("--engine", "numpy", *files) == MISMATCH
    lines = capsys.readouterr().out.splitlines()
    told = {name: [line for line in lines if name in line] for name in ("a.h5", "b.h5", "c.h5")}
    assert told["a.h5"][0].endswith("  ok") and "10 tensors, largest error" in told["c.h5"][0]
    assert [line.split()[0] for line in lines if "FAIL" in line] == ["grads/dk"] and len(lines) == 1 + 13 + 1 + 1
    assert lines[-1] == "2 of 3 goldens pass"


def test_a_golden_that_the_engine_does_not_take_is_passed_over(made, capsys, monkeypatch):
    golden, _ = made
    case = cases.make("ordinary", dtype="f8")
    write_golden(golden.parent / "wide.h5", case, reference(case), {})

    def narrow(self, operands, options):
        if operands.state_dtype == np.float64:
            raise kda.InputError("engine: expected no float64")

    monkeypatch.setattr(HostEngine, "check", narrow)
    report = golden.parent / "report.xml"
    assert check("--engine", "numpy", "--junit", report, golden, golden.parent / "wide.h5") == PASS
    out = capsys.readouterr().out
    assert "wide.h5: ordinary, engine numpy: not compared: engine: expected no float64" in out
    assert out.splitlines()[-1] == "1 of 2 goldens pass, 1 were not compared"
    taken, refused = ElementTree.parse(report).getroot()
    assert (taken.get("skipped"), refused.get("skipped"), refused.get("failures")) == ("0", "1", "0")
    assert refused.find("testcase/skipped").get("message") == "engine: expected no float64"
    assert check("--engine", "numpy", "--json", golden.parent / "wide.h5") == NOTHING_COMPARED
    assert json.loads(capsys.readouterr().out)[0]["refused"] == "engine: expected no float64"


def test_json_holds_every_metric(made, capsys):
    golden, results = made
    results["outputs/out"][70, 1, 2] += 1
    write_results(golden.parent / "out.h5", results, {})
    assert check("--json", "--output", golden.parent / "out.h5", golden) == MISMATCH
    [told] = json.loads(capsys.readouterr().out)
    assert told["tier"] == "tight" and not told["pass"] and told["by"].endswith("out.h5")
    out = told["tensors"][0]
    assert out["tensor"] == "outputs/out" and out["first_bad"] == [70, 1, 2] and out["nonfinite"] == 0
    # Sequence 2 has the tokens 49 to 97: one block.
    assert out["where"] == "sequence 2, head 1, tokens from 0" and out["worst"] > out["error"] > out["tolerance"]
    truth = read_golden(golden).results["outputs/out"]
    assert out["peak"] == pytest.approx(1 / abs(truth).max(), rel=1e-3)
    assert all(tensor["first_bad"] is None and tensor["pass"] for tensor in told["tensors"][1:])


def test_one_nan_spoils_one_block_of_the_report(made, capsys):
    golden, results = made
    results["outputs/out"][70, 1, 2] = np.nan
    write_results(golden.parent / "out.h5", results, {})
    assert check("--json", "--output", golden.parent / "out.h5", golden) == MISMATCH
    out = json.loads(capsys.readouterr().out)[0]["tensors"][0]
    assert (out["nonfinite"], out["first_nonfinite"], out["error"]) == (1, [70, 1, 2], None)
    assert out["where"] == "sequence 2, head 1, tokens from 0"


def test_junit(made, capsys):
    golden, results = made
    results["grads/dg"][3, 0, 0] = np.inf
    write_results(golden.parent / "out.h5", results, {})
    report = golden.parent / "report.xml"
    assert check("--junit", report, "--output", golden.parent / "out.h5", golden) == MISMATCH
    [suite] = ElementTree.parse(report).getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("10", "1", "0")
    failures = {case.get("name"): found.get("message") for case in suite if (found := case.find("failure")) is not None}
    assert list(failures) == ["grads/dg"] and "the first at (3, 0, 0)" in failures["grads/dg"]
    assert check("--junit", report, golden.parent / "none.h5", golden) == GOLDEN
    bad, good = ElementTree.parse(report).getroot()
    assert bad.get("errors") == "1" and "got nothing" in bad.find("testcase/error").get("message")
    assert (good.get("tests"), good.get("failures")) == ("10", "0")


def test_plot(made, capsys):
    pytest.importorskip("matplotlib")
    golden, results = made
    picture = golden.parent / "errors.png"
    assert check("--engine", "numpy", "--plot", picture, golden, DATA / "no-tokens.h5") == PASS
    content = picture.read_bytes()
    assert content.startswith(b"\x89PNG") and len(content) > 10_000
    with pytest.raises(kda.InputError, match="--plot: .*[Ff]ormat"):
        check("--engine", "numpy", "--plot", golden.parent / "errors.doc", golden)


def test_many_goldens_go_on_several_pages(made, tmp_path):
    pytest.importorskip("matplotlib")
    golden = read_golden(made[0])
    judgement = judging.judge(golden, golden.results, "out.h5")
    paths = write_heat_map(tmp_path / "errors.svg", [judgement] * 9)
    assert [Path(path).name for path in paths] == ["errors-1.svg", "errors-2.svg"]
    assert all(Path(path).read_text().count("g.h5") == count for path, count in zip(paths, (8, 1)))
    assert write_heat_map(tmp_path / "errors.pdf", [judgement] * 9) == [tmp_path / "errors.pdf"]
    assert b"/Count 2" in (tmp_path / "errors.pdf").read_bytes()


def test_the_picture_has_every_tensor_and_labels_sequences(tmp_path):
    pytest.importorskip("matplotlib")
    case = cases.make("conv", K=4, V=3)
    results = reference(case)
    wrong = results | {"grads/dA_log": results["grads/dA_log"] * np.array([1, 2], "f4")}
    write_golden(tmp_path / "g.h5", case, results, {})
    judgement = judging.judge(read_golden(tmp_path / "g.h5"), wrong, "out.h5")
    blocks = {verdict.name: verdict.blocks[1] for verdict in judgement.verdicts}
    assert blocks.keys() == results.keys()
    # Sequences of 33, 2, 0 and 40 tokens; a state each, an error a head of a parameter, a channel of a convolution.
    assert blocks["outputs/out"].shape == (3, 2) and blocks["outputs/final_state"].shape == (4, 2)
    assert blocks["grads/dA_log"].tolist() == [[0, 1]] and blocks["grads/conv/dv_weight"].shape == (1, 2 * 3)
    figure = heat_map._page([judgement])
    by_label = {label: [axes for axes in figure.axes if axes.get_xlabel() == label] for label in ("sequence", "token")}
    assert len(by_label["sequence"]) == 8 and not by_label["token"]
    assert [text.get_text() for text in by_label["sequence"][0].get_xticklabels()] == ["0", "1", "3"]
    titles = {text.get_text() for text in figure.texts}
    assert {name.rpartition("/")[2] for name in results} <= titles
    assert sum(bool(axes.images) for axes in figure.axes) == len(results)


def test_plot_without_matplotlib_says_what_brings_it(made, monkeypatch):
    golden, _ = made
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(kda.InputError, match="matplotlib.*plot"):
        check("--engine", "numpy", "--plot", golden.parent / "errors.png", golden)
    assert not (golden.parent / "errors.png").exists()


def test_a_report_that_cannot_be_written(made):
    golden, _ = made
    for option in ("--junit", "--plot"):
        with pytest.raises(kda.InputError, match="none/report.png: cannot be written: No such file"):
            check("--engine", "numpy", option, golden.parent / "none" / "report.png", golden)


def test_a_check_writes_nothing(made, monkeypatch):
    golden, _ = made
    folder = golden.parent
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    monkeypatch.chdir(folder)
    assert check("--engine", "numpy", "g.h5") == PASS
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


@pytest.mark.parametrize("ranks", [1, 3])
def test_over_ranks(ranks, tmp_path):
    files = [DATA / name for name in ("ragged.h5", "conv-bfloat16.h5", "no-tokens.h5")]
    done = launch(ranks, "-m", "mpi_runner", "golden", "check", "--engine", "numpy", "--json",
                  "--junit", tmp_path / "report.xml", *files)
    assert done.returncode == PASS, done.stderr
    told = json.loads(done.stdout)
    assert [one["by"] for one in told] == [f"engine numpy on {ranks} ranks"] * 3
    assert all(one["pass"] and len(one["tensors"]) >= 8 for one in told)
    assert len(ElementTree.parse(tmp_path / "report.xml").getroot()) == 3


def test_failures_over_ranks(tmp_path):
    # A golden of another problem under this one's name: what the engine makes of its inputs is wrong.
    case = cases.make("packed", K=4, V=3)
    results = reference(case)
    results["grads/dk"] = results["grads/dk"] * np.float32(1.01)
    write_golden(tmp_path / "wrong.h5", case, results, {})
    (tmp_path / "cut.h5").write_bytes((tmp_path / "wrong.h5").read_bytes()[:-500])
    start = ("-m", "mpi_runner", "golden", "check", "--engine", "numpy")
    wrong = launch(2, *start, tmp_path / "wrong.h5")
    assert wrong.returncode == MISMATCH, wrong.stderr
    assert [line.split()[0] for line in wrong.stdout.splitlines() if "FAIL" in line] == ["grads/dk"]
    both = launch(2, *start, tmp_path / "cut.h5", tmp_path / "wrong.h5")
    assert both.returncode == GOLDEN and both.stderr.count("cut.h5: expected an HDF5 file, got a truncated one") == 1
    assert "wrong.h5: packed" in both.stdout
    assert sorted(os.listdir(tmp_path)) == ["cut.h5", "wrong.h5"]
    none = launch(2, *start, "--engine", "cuda", tmp_path / "wrong.h5", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert none.returncode == USAGE and none.stderr.count("error: engine: expected") == 1


def test_nothing_compared_over_ranks(tmp_path):
    script = ("import pathlib, sys\nfrom mpi_runner.goldens import finding\n"
              "finding._PLACES = [pathlib.Path(sys.argv[1])]\n"
              "from mpi_runner.__main__ import main\nsys.exit(main(['golden', 'check']))")
    done = launch(2, "-c", script, tmp_path)
    assert done.returncode == NOTHING_COMPARED and done.stderr.count("nothing was compared") == 1
    assert done.stderr.count("no goldens in") == 1
