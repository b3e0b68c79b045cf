"""Input files: what is written comes back bit for bit, and nothing wrong is accepted."""

import hashlib
import os
from pathlib import Path

import h5py
import numpy as np
import pytest

from kda_engine import InputError, Options, cases
from kda_engine.arrays import BFLOAT16
from kda_engine.hdf5 import types
from kda_engine.hdf5.inputs import InputFile, digest, write_input

ARRAYS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "d_out", "d_final_state")


def write_case(path, case, **changes):
    fields = {name: getattr(case, name) for name in (*ARRAYS, "cu_seqlens", "conv", "options")}
    write_input(path, **(fields | changes))
    return path


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("name", cases.names())
def test_every_case_comes_back(tmp_path, name, dtype):
    case = cases.make(name, dtype=dtype)
    with InputFile(write_case(tmp_path / "in.h5", case)) as file:
        assert file.options == case.options
        assert (file.T, file.HV, file.V) == case.v.shape and (file.T, file.H, file.K) == case.q.shape
        expected = [0, file.T] if case.cu_seqlens is None else case.cu_seqlens
        assert file.cu_seqlens.dtype == np.int64 and file.cu_seqlens.tolist() == list(expected)
        assert file.N == len(expected) - 1
        for array in ARRAYS:
            given = getattr(case, array)
            assert file.has(array) == (given is not None)
            if given is not None:
                read = file.read_whole(array)
                assert read.dtype == given.dtype == file.dtypes[array] and read.flags.c_contiguous
                assert read.tobytes() == np.ascontiguousarray(given).tobytes()
        assert file.has("conv") == (case.conv is not None)
        if case.conv is not None:
            assert file.conv.activation == case.conv.activation
            for read, given in ((file.conv.weights, case.conv.weights), (file.conv.biases, case.conv.biases)):
                assert read.keys() == given.keys()
                assert all(np.array_equal(read[x], given[x]) for x in given)


def test_slabs_are_rows_of_the_whole(tmp_path):
    case = cases.make("ordinary", dtype="bfloat16")
    with InputFile(write_case(tmp_path / "in.h5", case)) as file:
        for start, stop in ((0, 0), (0, 1), (3, 17), (file.T, file.T)):
            assert np.array_equal(file.read("k", start, stop), case.k[start:stop])
        assert file.bytes_per_token() == sum(x.nbytes for x in (case.q, case.k, case.v, case.g, case.beta,
                                                                case.d_out)) // file.T


def test_bfloat16_is_stored_as_a_float_with_eight_exponent_bits(tmp_path):
    case = cases.make("ordinary", dtype="bfloat16")
    path = write_case(tmp_path / "in.h5", case)
    with h5py.File(path) as file:
        assert file["inputs/q"].id.get_type().get_fields() == (15, 7, 8, 0, 7)
        # Tools that know no bfloat16 read the same values as float32.
        assert np.array_equal(file["inputs/q"][()], case.q.astype("f4"))
        assert file["inputs/q"].fletcher32


def test_big_endian_files_are_read(tmp_path):
    case = cases.make("ordinary", dtype="float32")
    path = write_case(tmp_path / "in.h5", case)
    with h5py.File(path, "r+") as file:
        del file["inputs/k"]
        file["inputs/k"] = case.k.astype(">f4")
    with InputFile(path) as file:
        assert file.dtypes["k"] == np.dtype("f4") and np.array_equal(file.read("k", 2, 9), case.k[2:9])


def test_digest_is_the_sha256_of_the_file(tmp_path):
    path = write_case(tmp_path / "in.h5", cases.make("ordinary"))
    assert digest(path) == hashlib.sha256(path.read_bytes()).hexdigest()


def replace(name, make):
    def edit(file):
        old = file[f"inputs/{name}"][()]
        del file[f"inputs/{name}"]
        file[f"inputs/{name}"] = make(old)
    return edit


def attribute(where, name, value):
    return lambda file: file[where].attrs.__setitem__(name, value)


WRONG = {
    "missing dataset": (lambda f: f.__delitem__("inputs/k"), "/inputs/k", "got nothing"),
    "missing group": (lambda f: f.__delitem__("inputs"), "/inputs", "got nothing"),
    "unknown dataset": (lambda f: f.__setitem__("inputs/dtbias", np.zeros(3)), "/inputs/dtbias", "another name"),
    "group for dataset": (lambda f: (f.__delitem__("inputs/q"), f.create_group("inputs/q")), "/inputs/q", "a group"),
    "tokens": (replace("g", lambda x: x[:-1]), "/inputs/g", "expected shape [T,HV,K]"),
    "axes": (replace("q", lambda x: x[None]), "/inputs/q", "expected shape [T,H,K]"),
    "scalar": (replace("v", lambda x: x[0, 0, 0]), "/inputs/v", "expected shape [T,HV,V]"),
    "heads": (replace("v", lambda x: x[:, :1]), "/inputs/v", "multiple of 2"),
    "parameter": (replace("A_log", lambda x: x[:1]), "/inputs/A_log", "expected shape [HV]"),
    "state": (replace("initial_state", lambda x: x[..., :3]), "/inputs/initial_state", "[N,HV,K,V]"),
    "gradient": (replace("d_out", lambda x: x[..., :3]), "/inputs/d_out", "[T,HV,V]"),
    "integer type": (replace("beta", lambda x: x.astype("i4")), "/inputs/beta", "another type"),
    "opaque type": (replace("k", lambda x: x.astype("f2").view("V2")), "/inputs/k", "another type"),
    "falling cu_seqlens": (lambda f: f.__setitem__("inputs/cu_seqlens", [0, 40, 30, 70]), "/inputs/cu_seqlens",
                           "non-decreasing"),
    "overlong cu_seqlens": (lambda f: f.__setitem__("inputs/cu_seqlens", [0, 71]), "/inputs/cu_seqlens", "T = 70"),
    "short cu_seqlens": (lambda f: f.__setitem__("inputs/cu_seqlens", [0, 69]), "/inputs/cu_seqlens", "T = 70"),
    "float cu_seqlens": (lambda f: f.__setitem__("inputs/cu_seqlens", [0.0, 70.0]), "/inputs/cu_seqlens", "integers"),
    "format": (attribute("/", "format", "other"), "attribute format", "'kda-engine'"),
    "no format": (lambda f: f.attrs.__delitem__("format"), "attribute format", "None"),
    "version": (attribute("/", "format_version", 2), "format_version", "expected 1, got 2"),
    "kind": (attribute("/", "kind", "output"), "kind", "input or golden"),
    "gate": (attribute("inputs", "gate", "linear"), "gate", "lower_bound, softplus, log"),
    "lower bound": (attribute("inputs", "lower_bound", -6.0), "lower_bound", "[-5, 0)"),
    "unknown option": (attribute("inputs", "tolerance", 1e-6), "tolerance", "another name"),
    "text for a number": (attribute("inputs", "scale", "1"), "scale", "finite number"),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_files_are_refused(tmp_path, what):
    edit, dataset, expectation = WRONG[what]
    path = write_case(tmp_path / "in.h5", cases.make("ordinary"))
    with h5py.File(path, "r+") as file:
        edit(file)
    with pytest.raises(InputError) as refusal:
        InputFile(path)
    message = str(refusal.value)
    assert str(path) in message and dataset in message and expectation in message, message


CONV_WRONG = {
    "missing": (lambda f: f.__delitem__("inputs/conv/k_weight"), "conv/k_weight", "got nothing"),
    "shape": (replace("conv/v_weight", lambda x: x[:-1]), "conv/v_weight", ", W)"),
    "bias": (lambda f: (f["inputs/conv"].pop("q_bias", None), f.__setitem__("inputs/conv/q_bias", np.zeros(1))),
             "conv/q_bias", "expected shape"),
    "name": (lambda f: f.__setitem__("inputs/conv/weight", np.zeros(1)), "conv/weight", "another name"),
    "activation": (attribute("inputs/conv", "activation", "relu"), "activation", "silu or none"),
}


@pytest.mark.parametrize("what", CONV_WRONG)
def test_wrong_convolutions_are_refused(tmp_path, what):
    edit, dataset, expectation = CONV_WRONG[what]
    case = next(c for c in map(cases.make, cases.names()) if c.conv is not None)
    path = write_case(tmp_path / "in.h5", case)
    with h5py.File(path, "r+") as file:
        edit(file)
    with pytest.raises(InputError) as refusal:
        InputFile(path)
    assert dataset in str(refusal.value) and expectation in str(refusal.value), refusal.value


def test_files_that_are_no_hdf5_are_refused(tmp_path):
    good = write_case(tmp_path / "good.h5", cases.make("ordinary")).read_bytes()
    contents = {"nothing": None, "an empty file": b"", "something else": b"q, k, v",
                "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n", "truncated": good[: len(good) // 2],
                "HDF5": good[:20]}
    for what, content in contents.items():
        path = tmp_path / "in.h5"
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(InputError, match=what) as refusal:
            InputFile(path)
        assert str(path) in str(refusal.value)
    with pytest.raises(InputError, match="a folder"):
        InputFile(tmp_path)


def test_a_flipped_bit_is_found_on_reading(tmp_path):
    case = cases.make("ordinary")
    path = write_case(tmp_path / "in.h5", case)
    content = bytearray(path.read_bytes())
    place = content.find(case.g.tobytes()[:64])
    assert place > 0
    content[place + 5] ^= 16
    path.write_bytes(content)
    with InputFile(path) as file:
        file.read_whole("k")
        with pytest.raises(InputError, match="/inputs/g: .*checksum"):
            file.read("g", 0, file.T)


def test_damaged_files_never_escape_as_another_error(tmp_path):
    good = write_case(tmp_path / "good.h5", cases.make("ordinary", tokens=4, K=4, V=4)).read_bytes()
    random = np.random.default_rng(0)
    path = tmp_path / "bad.h5"
    for _ in range(300):
        content = bytearray(good)
        for place in random.integers(0, len(good), 8):
            content[place] ^= int(random.integers(1, 256))
        path.write_bytes(content)
        try:
            with InputFile(path) as file:
                for name in file.dtypes:
                    file.read_whole(name)
        except InputError as refusal:
            assert str(path) in str(refusal)


def test_the_writer_refuses_what_the_reader_would(tmp_path):
    case = cases.make("ordinary")
    for changes, what in (({"g": case.g[:-1]}, "/inputs/g"), ({"beta": case.beta.astype("i4")}, "/inputs/beta"),
                          ({"cu_seqlens": [0, 71]}, "/inputs/cu_seqlens"), ({"k": case.k[..., :3]}, "/inputs/k")):
        with pytest.raises(InputError, match=what):
            write_case(tmp_path / "in.h5", case, **changes)
    assert os.listdir(tmp_path) == []


def test_existing_files_are_kept_without_force(tmp_path):
    case = cases.make("ordinary")
    path = write_case(tmp_path / "in.h5", case)
    before = path.read_bytes()
    with pytest.raises(InputError, match="force"):
        write_case(path, case, q=case.q * 2)
    assert path.read_bytes() == before
    write_case(path, case, q=case.q * 2, force=True)
    with InputFile(path) as file:
        assert np.array_equal(file.read_whole("q"), case.q * 2)
    assert os.listdir(tmp_path) == ["in.h5"]


def test_any_integer_type_of_cu_seqlens_is_read(tmp_path):
    for dtype in ("i4", "u8", "i2"):
        path = write_case(tmp_path / f"{dtype}.h5", cases.make("ordinary"))
        with h5py.File(path, "r+") as file:
            file["inputs/cu_seqlens"] = np.array([0, 0, 33, 70], dtype)
        # The states are for one sequence, so only the message about them may come.
        with pytest.raises(InputError, match="initial_state"):
            InputFile(path)


def test_options_missing_in_the_file_have_their_defaults(tmp_path):
    path = write_case(tmp_path / "in.h5", cases.make("ordinary"))
    with h5py.File(path, "r+") as file:
        file["inputs"].attrs.clear()
        file["inputs"].attrs["qk_l2norm"] = np.int32(1)
    with InputFile(path) as file:
        assert file.options == Options()


def test_the_documented_way_to_write_bfloat16_is_read(tmp_path, monkeypatch):
    page = (Path(__file__).resolve().parent.parent / "docs" / "file-format.md").read_text()
    snippet = page.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(snippet, {})
    with h5py.File("example.h5") as file:
        assert types.float_dtype(file["x"]) == BFLOAT16
        assert np.array_equal(types.read_rows(file["x"], BFLOAT16, 1, 4), np.ones((3, 2)))


@pytest.mark.parametrize("lost", ["file", "dataset", "nothing"])
def test_a_virtual_dataset_needs_its_sources(tmp_path, lost):
    """HDF5 itself reads zeros for what is not there."""
    path, case = write_case(tmp_path / "in.h5", cases.make("ordinary")), cases.make("ordinary")
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["k" if lost != "dataset" else "other"] = case.k
    with h5py.File(path, "r+") as file:
        layout = h5py.VirtualLayout(case.k.shape, "f4")
        layout[:] = h5py.VirtualSource("source.h5", "k", case.k.shape)
        del file["inputs/k"]
        file["inputs"].create_virtual_dataset("k", layout)
    if lost == "file":
        (tmp_path / "source.h5").unlink()
    if lost == "nothing":
        with InputFile(path) as file:
            assert np.array_equal(file.read_whole("k"), case.k)
        return
    with pytest.raises(InputError, match="in.h5: /inputs/k: expected the source source.h5.* got nothing"):
        InputFile(path)
