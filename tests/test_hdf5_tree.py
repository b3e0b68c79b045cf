"""What an input's names lead to: links, values outside the file, virtual datasets, values never written. All is judged
before a value is read; HDF5 itself would follow, crash, hang or read zeros."""

import os
import subprocess
import sys

import h5py
import numpy as np
import pytest
from test_hdf5_inputs import write_case

from kda_engine import InputError, cases
from kda_engine.hdf5 import trial
from kda_engine.hdf5.inputs import InputFile
from kda_engine.hdf5.object_header import is_virtual
from kda_engine.hdf5.results import ResultFile

CASE = cases.make("ordinary")
K = CASE.k


@pytest.fixture
def untried(monkeypatch):
    """Virtual datasets made by these tests are sound enough for HDF5: a process for each would cost a second."""
    monkeypatch.setattr(trial.Trial, "make", lambda self: None)


@pytest.fixture
def edited(tmp_path):
    """edited(edit): the path of an input on which edit(h5py.File) was done; other.h5 beside it has K under "k"."""
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["k"], file["short"], file["wide"] = K, K[:30], K.astype("f8")
        file.create_dataset("never", K.shape, "f4")
        file["linked"] = h5py.ExternalLink("other.h5", "k")
        layout = h5py.VirtualLayout(K.shape, "f4")
        layout[:] = h5py.VirtualSource("other.h5", "k", K.shape)
        file.create_virtual_dataset("virtual", layout)

    def make(edit):
        path = write_case(tmp_path / "in.h5", CASE)
        with h5py.File(path, "r+") as file:
            edit(file)
        return path

    return make


def refused(path, text, allow_external=False):
    with pytest.raises(InputError, match=text) as refusal:
        InputFile(path, allow_external)
    return str(refusal.value)


def reads_k(path, allow_external=False):
    with InputFile(path, allow_external) as file:
        return np.array_equal(file.read_whole("k"), K) and np.array_equal(file.read("k", 3, 50), K[3:50])


def new_k(**arguments):
    def edit(file):
        del file["inputs/k"]
        return file["inputs"].create_dataset("k", K.shape, "f4", **arguments)
    return edit


def linked_k(link):
    def edit(file):
        del file["inputs/k"]
        file["there"], file["beside"] = K, h5py.ExternalLink("other.h5", "/")
        file["inputs/k"] = link
    return edit


# A convolution that cannot be read would be left out, and the results be wrong.
CONVOLUTIONS = {
    "link to nothing": (h5py.SoftLink("/nowhere"), "a link to nothing"),
    "link to another file": (h5py.ExternalLink("x.h5", "/"), "a link to another file"),
    "link to itself": (h5py.SoftLink("/inputs/conv"), "links that lead in a circle"),
    "no values": (h5py.Empty("f4"), "expected a group, got no values"),
    "a dataset": (np.zeros(3), "expected a group, got a dataset"),
    "a type": (np.dtype("f4"), "expected a group, got no values"),
}


@pytest.mark.parametrize("what", CONVOLUTIONS)
def test_a_convolution_that_cannot_be_read_is_refused(edited, what):
    value, text = CONVOLUTIONS[what]
    path = edited(lambda file: file.__setitem__("inputs/conv", value))
    assert refused(path, text).startswith(f"{path}: /inputs/conv: expected")


def test_an_empty_convolution_is_refused(edited):
    refused(edited(lambda file: file.create_group("inputs/conv")), "/inputs/conv: expected the datasets .* empty group")


@pytest.mark.parametrize("link", ["/inputs/k", "/nowhere", "/inputs/q/k"])
def test_links_that_lead_nowhere_are_refused(edited, link):
    refused(edited(linked_k(h5py.SoftLink(link))), "/inputs/k: expected")


def test_links_within_the_file_are_followed(edited):
    assert reads_k(edited(linked_k(h5py.SoftLink("/there"))))


@pytest.mark.parametrize("link", [h5py.ExternalLink("other.h5", "k"), h5py.SoftLink("/beside/k")], ids=["to", "by way"])
def test_links_to_other_files_are_followed_on_request(edited, link):
    path = edited(linked_k(link))
    refused(path, "/inputs/k: expected values in this file, got a link to another file .--allow-external reads it.")
    assert reads_k(path, allow_external=True)


@pytest.mark.parametrize("target, text", [
    (("gone.h5", "k"), "a link to nothing"), (("other.h5", "gone"), "a link to nothing"),
    (("other.h5", "virtual"), "got a virtual dataset"), (("other.h5", "never"), "never written"),
    (("fifo", "k"), "expected an HDF5 file, got a fifo"), (("/dev/null", "k"), "expected an HDF5 file, got a device"),
    (("loop", "k"), "symbolic links"), (("text", "k"), "expected an HDF5 file, got something else"),
])
def test_what_lies_behind_links_is_judged_too(edited, tmp_path, untried, target, text):
    os.mkfifo(tmp_path / "fifo")
    os.symlink("loop", tmp_path / "loop")
    (tmp_path / "text").write_text("q, k, v")
    refused(edited(linked_k(h5py.ExternalLink(*target))), text, allow_external=True)


def external_k(name, size=K.nbytes):
    return new_k(external=[(name, 0, size)])


def test_external_storage_is_read_on_request(edited, tmp_path):
    K.tofile(tmp_path / "values")
    for size in (K.nbytes, h5py.h5f.UNLIMITED):
        path = edited(external_k(str(tmp_path / "values"), size))
        refused(path, "/inputs/k: expected values in this file, got external storage .--allow-external reads it.")
        assert reads_k(path, allow_external=True)
        path.unlink()
    refused(edited(external_k("/etc/passwd")), "external storage")


@pytest.mark.parametrize("what, text", [("short", f"expected {K.nbytes} bytes in its external files, got {K.nbytes - 4}"),
                                        ("gone", "nothing or no regular file"), ("fifo", "nothing or no regular file")])
def test_external_files_that_cannot_fill_a_dataset_are_refused(edited, tmp_path, what, text):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "short").write_bytes(K.tobytes()[:-4])
    refused(edited(external_k(str(tmp_path / what))), text, allow_external=True)


def partly(**arguments):
    def edit(file):
        new_k(**arguments)(file)[:60] = K[:60]
    return edit


@pytest.mark.parametrize("edit, text", [
    (new_k(), "expected values, got a dataset that was never written"),
    (new_k(chunks=(8, 2, 16)), "expected all of its 9 chunks, got 0"),
    (partly(chunks=(8, 2, 16)), "expected all of its 9 chunks, got 8"),
    (partly(chunks=(8, 2, 16), maxshape=(None, 2, 16)), "expected all of its 9 chunks, got 8"),
    (partly(chunks=(7, 1, 16), compression="gzip"), "expected all of its 20 chunks, got 18"),
], ids=["contiguous", "chunked", "part", "growing", "compressed"])
@pytest.mark.parametrize("libver", ["earliest", "latest"])
def test_values_never_written_are_refused(edited, tmp_path, edit, text, libver):
    path = edited(edit)
    refused(path, f"/inputs/k: {text}")
    # The same in a file of the older or of the newest format.
    with h5py.File(path) as file, h5py.File(tmp_path / "again.h5", "w", libver=libver) as again:
        for name, value in file.attrs.items():
            again.attrs[name] = value
        for name, dataset in file["inputs"].items():
            if name != "k":
                again[f"inputs/{name}"] = dataset[()]
        again.create_group("spare")
        again["inputs/k"] = K
        edit(again)
    refused(tmp_path / "again.h5", f"/inputs/k: {text}")


def test_every_chunk_there_is_enough(edited):
    def edit(file):
        new_k(chunks=(8, 2, 16), maxshape=(None, 2, 16))(file)[...] = K
    assert reads_k(edited(edit))


def virtual_k(*mappings):
    """mappings: (rows here, rows there, dataset, file)."""
    def edit(file):
        file["there"] = K
        layout = h5py.VirtualLayout(K.shape, "f4")
        for here, there, name, other in mappings:
            shape = (30, *K.shape[1:]) if name == "short" and here == FIRST else K.shape
            layout[here] = h5py.VirtualSource(other, name, shape)[there]
        del file["inputs/k"]
        file["inputs"].create_virtual_dataset("k", layout)
    return edit


ALL, FIRST, LAST, EVEN, ODD = np.s_[:], np.s_[:30], np.s_[30:], np.s_[::2], np.s_[1::2]
VIRTUAL = {
    "whole": [(ALL, ALL, "k", "other.h5")], "in two": [(LAST, LAST, "k", "other.h5"), (FIRST, FIRST, "short", "other.h5")],
    "in turn": [(EVEN, EVEN, "k", "other.h5"), (ODD, ODD, "/there", ".")], "here": [(ALL, ALL, "/there", ".")],
}
NOT_VIRTUAL = {
    "half": ([(FIRST, FIRST, "k", "other.h5")], "a source for each of its 2240 values, got sources for 960"),
    "nothing": ([], "a source for each"),
    "twice": ([(ALL, ALL, "k", "other.h5"), (FIRST, FIRST, "k", "other.h5")], "one source for each"),
    "short": ([(ALL, ALL, "short", "other.h5")], r"got shape \(30, 2, 16\)"),
    "beyond": ([(FIRST, FIRST, "k", "other.h5"), (LAST, LAST, "short", "other.h5")], r"got shape \(30, 2, 16\)"),
    "type": ([(ALL, ALL, "wide", "other.h5")], "of type float32, got float64"),
    "never": ([(ALL, ALL, "never", "other.h5")], "never written"),
    "chain": ([(ALL, ALL, "virtual", "other.h5")], "got a virtual dataset"),
    "itself": ([(ALL, ALL, "/inputs/k", ".")], "got a virtual dataset"),
    "link": ([(ALL, ALL, "linked", "other.h5")], "a link to another file"),
    "fifo": ([(ALL, ALL, "k", "fifo")], "got a fifo"),
}


@pytest.mark.parametrize("what", VIRTUAL)
def test_virtual_datasets_of_plain_sources_are_read(edited, untried, what):
    assert reads_k(edited(virtual_k(*VIRTUAL[what])))


@pytest.mark.parametrize("what", NOT_VIRTUAL)
def test_other_virtual_datasets_are_refused(edited, tmp_path, untried, what):
    mappings, text = NOT_VIRTUAL[what]
    os.mkfifo(tmp_path / "fifo")
    assert "/inputs/k: expected" in refused(edited(virtual_k(*mappings)), text)


def test_virtual_sources_with_a_format_for_a_name_are_refused(edited, untried):
    def edit(file):
        del file["inputs/k"]
        properties, unlimited = h5py.h5p.create(h5py.h5p.DATASET_CREATE), h5py.h5s.UNLIMITED
        here = h5py.h5s.create_simple(K.shape, (unlimited, *K.shape[1:]))
        here.select_hyperslab((0, 0, 0), (unlimited, 1, 1), block=(1, *K.shape[1:]))
        there = h5py.h5s.create_simple((1, *K.shape[1:]))
        properties.set_virtual(here, b"part-%b.h5", b"k", there)
        space = h5py.h5s.create_simple(K.shape, (unlimited, *K.shape[1:]))
        h5py.h5d.create(file["inputs"].id, b"k", h5py.h5t.IEEE_F32LE, space, properties)
    refused(edited(edit), "/inputs/k: expected")


def test_a_damaged_virtual_dataset_is_opened_by_another_process_first(edited):
    """HDF5 crashes on some of these, in a process that must not be this one."""
    path = edited(virtual_k((ALL, ALL, "k", "other.h5")))
    good = path.read_bytes()
    assert reads_k(path)
    heap = good.index(b"GCOL")
    for bit in range(5, 250, 49):
        content = bytearray(good)
        content[heap + 20 + bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(content)
        code = """
import sys
from kda_engine import InputError
from kda_engine.hdf5.inputs import InputFile
try:
    InputFile(sys.argv[1]).close()
except InputError as error:
    print(error)
"""
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, (bit, done.stderr)
        assert done.stdout == "" or str(path) in done.stdout


@pytest.mark.parametrize("outcome, text", [("import os; os.abort()", "crashes"), ("import time; time.sleep(60)", "hangs"),
                                           ("print('in.h5: what it is'); raise SystemExit(1)", "in.h5: what it is")])
def test_what_the_other_process_meets_is_told(edited, tmp_path, monkeypatch, outcome, text):
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{outcome}\n")
    program.chmod(0o755)
    monkeypatch.setattr(trial.sys, "executable", str(program))
    monkeypatch.setattr(trial, "SECONDS", 5)
    refused(edited(virtual_k((ALL, ALL, "k", "other.h5"))), text)


@pytest.mark.parametrize("libver", ["earliest", "v110", "latest"])
@pytest.mark.parametrize("block", [0, 512])
def test_the_layout_is_told_from_the_bytes(tmp_path, libver, block):
    path = tmp_path / "some.h5"
    with h5py.File(path, "w", libver=libver, userblock_size=block) as file:
        file["plain"], file["scalar"] = K, 1.0
        file.create_dataset("chunked", data=K, chunks=(8, 2, 16), compression="gzip", track_order=True)
        file.create_dataset("external", K.shape, "f4", external=[("x", 0, K.nbytes)])
        for number in range(300):
            # So many that the header has to go on elsewhere.
            file["plain"].attrs[f"attribute {number}"] = np.arange(20)
        layout = h5py.VirtualLayout(K.shape, "f4")
        layout[:] = h5py.VirtualSource("x", "k", K.shape)
        file.create_virtual_dataset("virtual", layout)
        for number in range(9):
            file["virtual"].attrs[f"attribute {number}"] = "text" * 9
    with h5py.File(path) as file:
        root = file["/"]
        found = {name: is_virtual(file, root.id.links.get_info(name.encode()).u) for name in root}
        assert found == {name: name == "virtual" for name in root}
        assert is_virtual(file, 4) is None and is_virtual(file, 1 << 40) is None


def test_results_are_judged_alike(tmp_path):
    path = tmp_path / "out.h5"
    for link, text in ((h5py.SoftLink("/nowhere"), "a link to nothing"), (h5py.ExternalLink("a", "b"), "another file"),
                       (np.zeros(3), "3 axes, got shape"), (np.zeros((1, 2, 3), "i4"), "another type")):
        with h5py.File(path, "w") as file:
            file["outputs/out"] = link
        with pytest.raises(InputError, match=f"/outputs/out: expected .*{text}"):
            ResultFile(path)
    with h5py.File(path, "w") as file:
        file.create_dataset("outputs/out", (4, 1, 2), "f4")
    with pytest.raises(InputError, match="/outputs/out: .*never written"):
        ResultFile(path)
