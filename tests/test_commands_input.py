"""`input`: files from cases, captured tensors and texts, read back; wrong requests end with code 2 and no file."""

import io
import json
import os
import zipfile

import numpy as np
import pytest
from oracle import assert_close, run, upcast
from safetensors.numpy import save_file

from kda_engine import cases
from kda_engine.compare import TOLERANCES
from kda_engine.hdf5.inputs import InputFile
from kda_engine.layer import project
from mpi_runner.__main__ import main

ARRAYS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "d_out", "d_final_state")


def content(path):
    """Arrays by name (None where absent), cu_seqlens, options and conv of an input file."""
    with InputFile(path) as file:
        return ({name: file.read_whole(name) if file.has(name) else None for name in ARRAYS}, file.cu_seqlens,
                file.options, file.conv)


def same(a, b):
    return (a is None) == (b is None) and (a is None or (a.dtype == b.dtype and np.array_equal(a, b)))


def assert_holds(path, case):
    arrays, cu_seqlens, options, conv = content(path)
    for name in ARRAYS:
        assert same(arrays[name], getattr(case, name)), name
    assert np.array_equal(cu_seqlens, [0, len(case.q)] if case.cu_seqlens is None else case.cu_seqlens)
    assert options == case.options and (conv is None) == (case.conv is None)
    if conv is not None:
        assert conv.activation == case.conv.activation
        for part in ("weights", "biases"):
            given, stored = getattr(case.conv, part), getattr(conv, part)
            assert given.keys() == stored.keys() and all(same(given[key], stored[key]) for key in given)


def refused(capsys, *arguments):
    """The message of a command that ends with exit code 2."""
    capsys.readouterr()
    assert main(["input", *map(str, arguments)]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("name", cases.names())
def test_every_case_comes_back(tmp_path, name):
    path = tmp_path / "case.h5"
    assert main(["input", "--case", name, str(path)]) == 0
    assert_holds(path, cases.make(name))


def test_overrides_of_a_case(tmp_path, capsys):
    path = tmp_path / "case.h5"
    assert main(["input", "--case", "ordinary", "--tokens", "40", "--heads", "2", "--value-heads", "4", "--K", "6",
                 "--V", "5", "--sequences", "3", "--dtype", "bfloat16", "--seed", "9", str(path)]) == 0
    assert_holds(path, cases.make("ordinary", "bfloat16", 9, tokens=40, heads=2, value_heads=4, K=6, V=5, sequences=3))
    out = capsys.readouterr().out
    assert out.startswith(f"wrote {path}: 40 tokens, 3 sequences, H 2, HV 4, K 6, V 5, gate lower_bound")
    assert "with d_out" in out


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_captured_safetensors(tmp_path, dtype):
    case = cases.make("conv-biased", dtype)
    tensors = {name: getattr(case, name) for name in ARRAYS}
    tensors |= {f"conv/{x}_weight": w for x, w in case.conv.weights.items()}
    tensors |= {f"conv/{x}_bias": b for x, b in case.conv.biases.items()}
    metadata = {"gate": "lower_bound", "lower_bound": "-5", "qk_l2norm": "true", "format": "pt", "activation": "silu"}
    save_file(tensors, tmp_path / "capture.safetensors", metadata)
    assert main(["input", "--from", str(tmp_path / "capture.safetensors"), str(tmp_path / "x.h5")]) == 0
    assert_holds(tmp_path / "x.h5", case)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_npz(tmp_path, dtype):
    case = cases.make("log-value", dtype)
    tensors = {name: getattr(case, name) for name in ARRAYS if getattr(case, name) is not None}
    np.savez(tmp_path / "capture.npz", cu_seqlens=case.cu_seqlens.astype("i4"), gate="log", qk_l2norm=True,
             **{"option.beta": "value"}, **tensors)
    assert main(["input", "--from", str(tmp_path / "capture.npz"), str(tmp_path / "x.h5")]) == 0
    assert_holds(tmp_path / "x.h5", case)


def test_options_of_the_command_line_override_the_capture(tmp_path):
    case = cases.make("no-states", lengths=(70,))
    tensors = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}
    np.savez(tmp_path / "capture.npz", gate="log", **{"option.beta": "value", "option.scale": 0.5}, **tensors)
    assert main(["input", "--from", str(tmp_path / "capture.npz"), "--gate", "softplus", "--beta", "logit2",
                 "--qk-l2norm", "0", "--lower-bound", "-2", "--state-layout", "VK", str(tmp_path / "x.h5")]) == 0
    arrays, _, options, conv = content(tmp_path / "x.h5")
    assert (options.gate, options.beta, options.scale, options.qk_l2norm) == ("softplus", "logit2", 0.5, False)
    assert (options.lower_bound, options.state_layout) == (-2.0, "VK") and conv is None
    assert arrays["d_out"] is None and arrays["A_log"] is None


def test_a_captured_batch_is_packed(tmp_path):
    case = cases.make("ordinary", lengths=(20, 20, 20))
    per_token = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta", "d_out")}
    np.savez(tmp_path / "capture.npz", A_log=case.A_log, dt_bias=case.dt_bias, initial_state=case.initial_state,
             d_final_state=case.d_final_state,
             **{name: x.reshape((3, 20) + x.shape[1:]) for name, x in per_token.items()})
    assert main(["input", "--from", str(tmp_path / "capture.npz"), str(tmp_path / "x.h5")]) == 0
    assert_holds(tmp_path / "x.h5", case)


def test_bad_captures_are_refused(tmp_path, capsys):
    out, case = tmp_path / "x.h5", cases.make("ordinary")
    good = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}

    def message(changed, *more, drop=()):
        path = tmp_path / "capture.npz"
        np.savez(path, **{name: x for name, x in (good | changed).items() if name not in drop})
        text = refused(capsys, "--from", path, *more, out)
        assert not out.exists()
        return text

    assert "capture.npz: g: expected a tensor of that name, got beta, k, q, v" in message({}, drop=("g",))
    assert "queries: expected tensors named q, k, v" in message({"queries": case.q})
    assert "colour: expected an option named gate, " in message({"colour": "red"})
    assert "gate: expected one of lower_bound, softplus, log, got 'open'" in message({"gate": "open"})
    assert "scale: expected a number, got 'much'" in message({"scale": "much"})
    assert "beta: expected one of logit, logit2, value, got 'x'" in message({}, "--beta", "x")
    assert "v: expected" in message({"v": case.v[1:]})
    assert "q: expected" in message({"q": case.q.astype("i4")})
    assert "q: expected a batch [2, 35, ...] as k is" in message({"k": case.k.reshape(2, 35, 2, 16)})
    assert "activation: expected silu or none, got 'relu'" in message({"activation": "relu"})
    batch = {name: np.concatenate([x[None], x[None]]) for name, x in good.items()}
    assert "cu_seqlens: expected none beside a batch of 2" in message(batch | {"cu_seqlens": np.array([0, 140])})
    assert "--tokens: expected without --from" in message({}, "--tokens", "3")


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_unreadable_captures(tmp_path, capsys, suffix):
    missing, broken, out = tmp_path / f"missing.{suffix}", tmp_path / f"broken.{suffix}", tmp_path / "x.h5"
    broken.write_bytes(b"not tensors at all")
    assert f"{missing}: " in refused(capsys, "--from", missing, out)
    assert f"{broken}: expected a" in refused(capsys, "--from", broken, out)
    assert "named .npz or .safetensors" in refused(capsys, "--from", tmp_path / "x.pt", out)
    assert not out.exists()


def npz_of(path, members):
    """An npz of raw members: {name: (header's shape, header's type, bytes behind it)}."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, (shape, dtype, data) in members.items():
            head = io.BytesIO()
            np.lib.format.write_array_header_1_0(head, {"shape": shape, "fortran_order": False, "descr": dtype})
            archive.writestr(f"{name}.npy", head.getvalue() + data)


def good_members():
    case = cases.make("ordinary", dtype="float32")
    arrays = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}
    return {name: (x.shape, "<f4", x.tobytes()) for name, x in arrays.items()}


SIXTY_MB = bytes(60_000_000)
# A good capture's tensor (shape, type, bytes) in whose place another stands, and what the refusal says.
DECLARED = {
    "another name": ({"zeros": ((15_000_000,), "<f4", SIXTY_MB)}, "zeros: expected tensors named"),
    "a wrong shape": ({"v": ((15_000_000,), "<f4", SIXTY_MB)}, "/inputs/v: expected shape"),
    "terabytes": ({"v": ((10**12, 2, 16), "<f4", b"")}, "v: expected an npz file of plain arrays"),
    "less than nothing": ({"v": ((-70, -2, 16), "<f4", bytes(70 * 2 * 16 * 4))}, "v: expected an npz file of plain arrays"),
    "an integer": ({"beta": ((70, 2), "<i8", bytes(70 * 2 * 8))}, "/inputs/beta: expected bfloat16"),
    "a long text": ({"gate": ((), "<U700000", bytes(2_800_000))}, "got: one short text"),
    "no array": ({}, "q: expected a tensor of that name, got none"),
}


@pytest.mark.parametrize("what", DECLARED)
def test_a_capture_is_judged_by_what_it_declares(tmp_path, capsys, monkeypatch, what):
    """Nothing is unpacked: a small file may unpack to gigabytes."""
    def unpack(*_, **__):
        raise AssertionError("a tensor was read")
    monkeypatch.setattr(np.lib.format, "read_array", unpack)
    others, text = DECLARED[what]
    npz_of(tmp_path / "in.npz", good_members() | others if others else {})
    err = refused(capsys, "--from", tmp_path / "in.npz", tmp_path / "out.h5")
    assert f"{tmp_path}/in.npz: " in err and text in err and err.count("\n") == 1, err
    assert not (tmp_path / "out.h5").exists()


def test_a_capture_larger_than_the_memory_is_refused(tmp_path, capsys, monkeypatch):
    npz_of(tmp_path / "in.npz", good_members())
    monkeypatch.setattr("mpi_runner.resources.memory_available", lambda: 1000)
    assert "fit in memory, 1000 bytes" in refused(capsys, "--from", tmp_path / "in.npz", tmp_path / "out.h5")


def test_an_encrypted_capture_is_refused(tmp_path, capsys):
    npz_of(tmp_path / "in.npz", good_members())
    content = bytearray((tmp_path / "in.npz").read_bytes())
    # The flag of encryption in the first entry of the central directory.
    content[content.index(b"PK\x01\x02") + 8] |= 1
    (tmp_path / "in.npz").write_bytes(content)
    assert "got: an encrypted one" in refused(capsys, "--from", tmp_path / "in.npz", tmp_path / "out.h5")


@pytest.mark.parametrize("tensors, text", [
    ({"q": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}, "a tensor of a known type, got: type F8_E4M3"),
    ({"q": {"dtype": "F4", "shape": [8], "data_offsets": [0, 4]}}, "q: expected a tensor of a known type, got: type F4"),
    ({"q": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}, "expected a safetensors file"),
    ({"q": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, "k: expected a tensor of that name, got q"),
    ({"q": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 4]}}, "expected a safetensors file"),
    ([], "expected a safetensors file"),
], ids=["float8", "float4", "terabytes", "one", "overflow", "list"])
def test_bad_safetensors_are_refused(tmp_path, capsys, tensors, text):
    head = json.dumps(tensors).encode()
    (tmp_path / "in.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"1234")
    assert text in refused(capsys, "--from", tmp_path / "in.safetensors", tmp_path / "out.h5")


@pytest.mark.parametrize("kind", ["fifo", "device", "folder", "loop"])
@pytest.mark.parametrize("source", ["--from", "--from-text"])
def test_sources_must_be_regular_files(tmp_path, capsys, kind, source):
    path = tmp_path / "in.npz"
    {"fifo": os.mkfifo, "folder": os.mkdir, "loop": lambda path: os.symlink(path, path),
     "device": lambda path: os.symlink("/dev/zero", path)}[kind](path)
    assert f"{path}: expected a file of" in refused(capsys, source, path, tmp_path / "out.h5")


def test_pickles_are_not_opened(tmp_path, capsys):
    path = tmp_path / "capture.npz"
    np.savez(path, q=np.array([{"a": 1}], object))
    assert "expected an npz file of plain arrays" in refused(capsys, "--from", path, tmp_path / "x.h5")


def test_a_text(tmp_path):
    text = b"the cat sat on the mat, and the cat sat on the hat"
    (tmp_path / "text").write_bytes(text)
    assert main(["input", "--from-text", str(tmp_path / "text"), "--heads", "2", "--value-heads", "4", "--K", "8",
                 "--V", "6", "--tokens", "40", "--seed", "3", "--dtype", "bfloat16", str(tmp_path / "x.h5")]) == 0
    assert_holds(tmp_path / "x.h5", project(text[:40], heads=2, value_heads=4, K=8, V=6, seed=3, dtype="bfloat16"))
    assert main(["input", "--from-text", str(tmp_path / "text"), str(tmp_path / "whole.h5")]) == 0
    with InputFile(tmp_path / "whole.h5") as file:
        assert (file.T, file.H, file.HV, file.K, file.V) == (len(text), 4, 4, 64, 64) and file.has("d_out")


def test_a_layer_is_what_it_says():
    text = bytes(range(256)) * 2 + b"abcdabcd"
    case = project(text, heads=2, value_heads=4, K=16, V=8, seed=1)
    assert case.options.gate == "softplus" and case.options.beta == "logit" and case.options.qk_l2norm
    assert case.conv.activation == "silu" and not case.conv.biases
    assert {name: w.shape for name, w in case.conv.weights.items()} == {"q": (32, 4), "k": (32, 4), "v": (32, 4)}
    assert all(abs(w).max() <= 0.5 for w in case.conv.weights.values())
    rate, time_step = np.exp(case.A_log), np.log1p(np.exp(case.dt_bias.astype("f8")))
    assert (rate >= 1).all() and (rate <= 16).all()
    assert time_step.min() >= 0.999e-3 and time_step.max() <= 1.001e-1 and np.log(time_step).std() > 0.5
    # Equal bytes project equally, different ones do not; behind the convolution equal four bytes give equal keys.
    for name in ("q", "k", "v", "g", "beta"):
        x = getattr(case, name)
        assert np.array_equal(x[:256], x[256:512]) and len(np.unique(x[:256].reshape(256, -1), axis=0)) == 256
    assert np.array_equal(case.k[515], case.k[519]) and 0.1 < case.q.std() < 2
    assert not np.array_equal(case.q, project(text, heads=2, value_heads=4, K=16, V=8, seed=2).q)


def test_a_layer_runs_forward_and_backward():
    case = project(b"to be, or not to be: that is the question. " * 4, heads=2, K=16, V=16)
    assert_close(run(case, "numpy"), run(upcast(case), "reference"), TOLERANCES["f4"])
    wide = project(b"to be, or not to be", heads=2, K=16, V=16, dtype="float64")
    assert wide.q.dtype == wide.A_log.dtype == np.float64
    empty = project(b"", heads=1, K=4, V=4)
    assert run(empty, "numpy")["out"].shape == (0, 1, 4)


def test_wrong_requests(tmp_path, capsys):
    out = tmp_path / "x.h5"
    assert "case: expected one of ordinary, " in refused(capsys, "--case", "none", out)
    assert "--gate: expected without --case, which fixes" in refused(capsys, "--case", "ordinary", "--gate", "log", out)
    assert "K: expected integers of at least 1, got 0" in refused(capsys, "--case", "ordinary", "--K", 0, out)
    assert "dtype: expected bfloat16, " in refused(capsys, "--case", "ordinary", "--dtype", "int8", out)
    assert "expected a file of text, got nothing" in refused(capsys, "--from-text", tmp_path / "missing", out)
    (tmp_path / "text").write_bytes(b"abc")
    text = tmp_path / "text"
    assert "--sequences: expected without --from-text" in refused(capsys, "--from-text", text, "--sequences", 2, out)
    assert "value_heads: expected a multiple of 4" in refused(capsys, "--from-text", text, "--value-heads", 6, out)
    assert "K: expected at least 1, got 0" in refused(capsys, "--from-text", text, "--K", 0, out)
    assert "tokens: expected at least 0, got -1" in refused(capsys, "--from-text", text, "--tokens", -1, out)
    assert "output: expected another file than" in refused(capsys, "--from-text", text, text)
    for source in (["--case", "ordinary"], ["--from-text", text]):
        assert "seed: expected at least 0, got -1" in refused(capsys, *source, "--seed", -1, out)
    assert text.read_bytes() == b"abc" and not out.exists()
    assert "expected an existing folder" in refused(capsys, "--case", "ordinary", tmp_path / "no" / "x.h5")
    for arguments in ([], ["--case", "ordinary"], ["--case", "ordinary", "--from-text", "x", "y"], ["x.h5"]):
        with pytest.raises(SystemExit) as stopped:
            main(["input", *arguments])
        assert stopped.value.code == 2


def test_an_existing_file_stays_unless_forced(tmp_path, capsys):
    out = tmp_path / "x.h5"
    out.write_bytes(b"older")
    assert str(out) in refused(capsys, "--case", "ordinary", out) and out.read_bytes() == b"older"
    assert main(["input", "--case", "ordinary", "--force", str(out)]) == 0
    assert_holds(out, cases.make("ordinary"))
