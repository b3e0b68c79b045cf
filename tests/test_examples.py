"""The examples, with PyTorch on the CPU."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from kda_engine.hdf5.golden import read_golden
from kda_engine.hdf5.inputs import InputFile
from kda_engine.hdf5.results import ResultFile
from mpi_runner.__main__ import main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def example(monkeypatch):
    """The example of that name, run with arguments."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(ROOT / "examples")

    def run(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        __import__(name).main()

    return run


@pytest.mark.parametrize("golden", ["ordinary", "ragged", "grouped-heads", "state-layout-VK", "log-value-bfloat16",
                                    "softplus-logit2-float64", "ordinary-bfloat16", "no-parameters", "no-states"])
def test_another_implementation_is_judged(example, golden, tmp_path, capsys):
    path, output = ROOT / "data" / f"{golden}.h5", tmp_path / "out.h5"
    example("judge_torch", path, output, "--operator", "torch_kda:recurrent_kda")
    capsys.readouterr()
    assert main(["golden", "check", "--json", "--output", str(output), str(path)]) == 0
    [told] = json.loads(capsys.readouterr().out)
    assert {tensor["tensor"] for tensor in told["tensors"]} == set(read_golden(path).results)


def test_a_folder_of_goldens_becomes_a_folder_of_outputs(example, tmp_path, capsys):
    goldens = tmp_path / "goldens"
    goldens.mkdir()
    for name in ("ordinary.h5", "one-token.h5", "conv-biased.h5"):
        shutil.copy(ROOT / "data" / name, goldens)
    example("judge_torch", goldens, tmp_path / "outputs", "--operator", "torch_kda:recurrent_kda")
    assert sorted(path.name for path in (tmp_path / "outputs").iterdir()) == ["one-token.h5", "ordinary.h5"]
    capsys.readouterr()
    assert main(["golden", "check", "--outputs", str(tmp_path / "outputs"), str(goldens)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 3 goldens pass, 1 were not compared"


def test_a_wrong_implementation_is_found(example, tmp_path, capsys, monkeypatch):
    path, output = ROOT / "data" / "ordinary.h5", tmp_path / "out.h5"
    import torch_kda

    right = torch_kda.recurrent_kda
    monkeypatch.setattr(torch_kda, "recurrent_kda", lambda *args, **kwargs: right(*args, **kwargs | {"scale": 0.26}))
    example("judge_torch", path, output, "--operator", "torch_kda:recurrent_kda")
    assert main(["golden", "check", "--output", str(output), str(path)]) == 1


def test_goldens_with_a_convolution_are_left_out(example, tmp_path):
    with pytest.raises(SystemExit, match="short convolution"):
        example("judge_torch", ROOT / "data" / "conv-biased.h5", tmp_path / "out.h5",
                "--operator", "torch_kda:recurrent_kda")


@pytest.mark.parametrize("kind", ["npz", "safetensors"])
def test_a_layer_is_captured_and_run(example, kind, tmp_path, capsys):
    captured, source, output = (tmp_path / name for name in (f"x.{kind}", "in.h5", "out.h5"))
    example("capture_torch", captured)
    assert main(["input", "--from", str(captured), str(source)]) == 0
    with InputFile(source) as file:
        assert (file.T, file.N, file.H, file.K) == (100, 2, 2, 16) and file.has("d_out") and file.has("dt_bias")
        assert (file.options.gate, file.options.beta, file.options.qk_l2norm) == ("softplus", "logit", True)
    assert main(["run", str(source), str(output), "--backward", "--engine", "numpy"]) == 0
    with ResultFile(output) as file:
        assert all(np.abs(file.read(name)).max() > 0 for name in ("outputs/out", "grads/dk", "grads/dA_log"))


def test_captured_results_are_the_layers_own(example, tmp_path):
    """Outputs and gradients of the captured call, as PyTorch computed them, against the engine's on the file."""
    import capture_torch
    import torch
    import torch_kda

    torch.manual_seed(1)
    model, x = torch_kda.KimiDeltaAttention(), torch.randn(2, 40, 32)
    right, kept = torch_kda.recurrent_kda, {}

    def keeping(*args, **kwargs):
        kept["out"], state = right(*args, **kwargs)
        args[1].retain_grad()
        kept["k"] = args[1]
        return kept["out"], state

    # The hook reads the signature of what it stands in for.
    keeping.__signature__ = __import__("inspect").signature(right)
    torch_kda.recurrent_kda = keeping
    try:
        with capture_torch.Capture("torch_kda", "recurrent_kda") as capture:
            model(x).square().mean().backward()
        assert torch_kda.recurrent_kda is keeping
    finally:
        torch_kda.recurrent_kda = right
    capture.save(tmp_path / "x.npz")
    assert main(["input", "--from", str(tmp_path / "x.npz"), str(tmp_path / "in.h5")]) == 0
    assert main(["run", str(tmp_path / "in.h5"), str(tmp_path / "out.h5"), "--backward", "--engine", "numpy"]) == 0
    close = lambda a, b: np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)
    with ResultFile(tmp_path / "out.h5") as file:
        assert close(file.read("outputs/out"), kept["out"].detach().numpy().reshape(80, 2, 16))
        assert close(file.read("grads/dk"), kept["k"].grad.numpy().reshape(80, 2, 16))
        assert close(file.read("grads/dA_log"), model.A_log.grad.numpy())
        assert close(file.read("grads/ddt_bias"), model.dt_bias.grad.numpy().reshape(2, 16))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_the_engine_as_an_operator_of_pytorch(example, dtype):
    """Values and every gradient against PyTorch's own graph of the recurrence, in two calls of a training loop."""
    import torch
    from autograd_torch import chunk_kda
    from torch_kda import recurrent_kda

    torch.manual_seed(2)
    B, T, H, HV, K, V = 2, 37, 2, 4, 8, 6
    shapes = {"q": (B, T, H, K), "k": (B, T, H, K), "v": (B, T, HV, V), "g": (B, T, HV, K), "beta": (B, T, HV),
              "A_log": (HV,), "dt_bias": (HV * K,), "initial_state": (B, HV, K, V)}
    kind = getattr(torch, dtype)
    wide = torch.float64 if dtype == "float64" else torch.float32
    leaves = {name: torch.randn(shape).to(wide if name in ("A_log", "dt_bias", "initial_state") else kind)
              .requires_grad_() for name, shape in shapes.items()}
    options = {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True,
               "safe_gate": True, "lower_bound": -5.0, "output_final_state": True}
    weights = torch.randn(B, T, HV, V).to(kind), torch.randn(B, HV, K, V).to(wide)

    def gradients(operator):
        for x in leaves.values():
            x.grad = None
        out, state = operator(**leaves, **options)
        ((out * weights[0]).sum() + (state * weights[1]).sum()).backward()
        return {"out": out.detach(), "state": state.detach(), **{name: x.grad for name, x in leaves.items()}}

    right, found = gradients(recurrent_kda), gradients(chunk_kda)
    allowed = {"float32": 1e-5, "float64": 1e-12, "bfloat16": 1e-2}[dtype]
    for name, x in right.items():
        assert found[name].dtype == x.dtype and found[name].shape == x.shape, name
        assert (found[name] - x).double().norm() <= allowed * x.double().norm(), name
    # Without the final state, and with a gate that has no parameters.
    few = {name: leaves[name] for name in ("q", "k", "v", "g", "beta")}
    few["g"] = -leaves["g"].exp().detach()
    assert chunk_kda(**few)[1] is None


def test_a_model_trains_on_the_engine(example, capsys, monkeypatch):
    import torch_kda

    monkeypatch.setattr(torch_kda, "recurrent_kda", torch_kda.recurrent_kda)
    example("autograd_torch")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0]


@pytest.mark.parametrize("switches", [
    {}, {"use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "use_qk_l2norm_in_kernel": True},
    {"use_gate_in_kernel": True, "lower_bound": -2.0, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    {"use_qk_l2norm_in_kernel": True, "state_v_first": True, "scale": 0.2}], ids=str)
def test_the_same_call_of_compat_gives_the_same(example, switches):
    import torch
    from torch_kda import recurrent_kda

    from kda_engine.compat import chunk_kda

    torch.manual_seed(3)
    B, T, H, K = 2, 25, 2, 8
    x = {name: torch.randn(B, T, H, K, dtype=torch.float64) / 3 for name in ("q", "k", "v", "g")}
    x["g"] = x["g"] if switches.get("use_gate_in_kernel") else -x["g"].exp()
    x |= {"beta": torch.rand(B, T, H, dtype=torch.float64), "A_log": torch.randn(H, dtype=torch.float64),
          "dt_bias": torch.randn(H * K, dtype=torch.float64), "initial_state": torch.randn(B, H, K, K).double()}
    right, found = (operator(**x, output_final_state=True, **switches) for operator in (recurrent_kda, chunk_kda))
    for a, b in zip(found, right):
        assert isinstance(a, torch.Tensor) and (a - b).norm() <= 1e-12 * b.norm()
