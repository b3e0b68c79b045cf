"""Kernel sources, their build and its disk cache, and how problems are cut for the device; none of it needs a GPU."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cupy")

import cubin  # noqa: E402

from kda_engine.device import build, module, sources  # noqa: E402
from kda_engine.device.plans import portable as plan  # noqa: E402
from kda_engine.device.kernels import KERNELS  # noqa: E402
from kda_engine.device.kernels.portable import WIDE_COLUMNS, variant  # noqa: E402
from kda_engine.device.target import KNOWN  # noqa: E402
from kda_engine.errors import InputError  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent

KERNEL = '#include "common/factor.cuh"\nextern "C" __global__ void triple(const float* x, int n, float* y) { y[n] = kFactor * x[n]; }\n'


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A source tree of one kernel and one header, and an empty cache."""
    (tmp_path / "sources" / "common").mkdir(parents=True)
    (tmp_path / "sources" / "kernels").mkdir()
    (tmp_path / "sources" / "common" / "factor.cuh").write_text("constexpr float kFactor = 3.0f;\n")
    (tmp_path / "sources" / "kernels" / "triple.cu").write_text(KERNEL)
    monkeypatch.setattr(sources, "ROOT", tmp_path / "sources")
    monkeypatch.setenv("KDA_ENGINE_CACHE", str(tmp_path / "cache"))
    sources.digest.cache_clear()
    yield tmp_path
    sources.digest.cache_clear()


def cached(tree):
    return sorted(path.name for path in (tree / "cache").iterdir() if path.name != "locks")


def test_every_header_that_a_kernel_reaches_counts(tree):
    assert sources.reachable("kernels/triple.cu") == ["common/factor.cuh", "kernels/triple.cu"]
    before = sources.digest("kernels/triple.cu")
    (tree / "sources" / "common" / "factor.cuh").write_text("constexpr float kFactor = 4.0f;\n")
    sources.digest.cache_clear()
    assert sources.digest("kernels/triple.cu") != before


def test_a_kernel_is_compiled_once(tree, monkeypatch):
    path = module.cubin_path("kernels/triple.cu", (), "sm_90a")
    assert cached(tree) == [path.name] and path.read_bytes()[:4] == b"\x7fELF"
    monkeypatch.setattr(build, "compile_file", lambda *given: pytest.fail("compiled again"))
    assert module.cubin_path("kernels/triple.cu", (), "sm_90a") == path


@pytest.mark.parametrize("change", ("header", "define", "target", "compiler"))
def test_whatever_changes_the_code_makes_an_entry_of_its_own(tree, monkeypatch, change):
    module.cubin_path("kernels/triple.cu", (), "sm_90a")
    defines, target = (), "sm_90a"
    if change == "header":
        (tree / "sources" / "common" / "factor.cuh").write_text("constexpr float kFactor = 4.0f;\n")
        sources.digest.cache_clear()
    elif change == "define":
        defines = (("UNUSED", 1),)
    elif change == "target":
        target = "sm_80"
    else:
        monkeypatch.setattr(build, "compiler_version", lambda: (99, 0))
    module.cubin_path("kernels/triple.cu", defines, target)
    assert len(cached(tree)) == 2


COMPILE = """
import sys, time
from pathlib import Path
from kda_engine.device import build, module, sources
sources.ROOT, compile_file = Path(sys.argv[1]), build.compile_file
def slowly(*given):
    with open(sys.argv[1] + "/compiled", "a") as log:
        log.write("once\\n")
    time.sleep(0.5)
    return compile_file(*given)
build.compile_file = slowly
print(module.cubin_path("kernels/triple.cu", (), "sm_90a"))
"""


def test_of_processes_that_want_a_kernel_at_once_one_compiles_it(tree):
    running = [subprocess.Popen([sys.executable, "-c", COMPILE, str(tree / "sources")], cwd=ROOT, text=True,
                                stdout=subprocess.PIPE) for _ in range(3)]
    paths = {process.communicate()[0].strip() for process in running}
    assert [process.returncode for process in running] == [0, 0, 0] and len(paths) == 1
    assert cached(tree) == [Path(paths.pop()).name]
    assert (tree / "sources" / "compiled").read_text() == "once\n"


def test_a_file_system_without_locks_will_do(tree, monkeypatch):
    def refuse(*given):
        raise OSError("no locks")

    monkeypatch.setattr(module.fcntl, "flock", refuse)
    assert module.cubin_path("kernels/triple.cu", (), "sm_90a").read_bytes()[:4] == b"\x7fELF"


def test_a_lock_that_cannot_be_had_will_not_be_waited_for(tree):
    """As one that another user made; root may open that, but not a folder."""
    path = module.cubin_path("kernels/triple.cu", (), "sm_90a")
    lock = path.parent / "locks" / path.stem
    path.unlink()
    lock.unlink()
    lock.mkdir()
    assert module.cubin_path("kernels/triple.cu", (), "sm_90a") == path and path.exists()


@pytest.mark.parametrize("place", ("folder", "entry"))
def test_a_cache_that_cannot_be_written_is_told(tree, monkeypatch, place):
    taken = tree / "taken"
    taken.write_text("no folder")
    if place == "folder":
        monkeypatch.setenv("KDA_ENGINE_CACHE", str(taken))
    else:
        monkeypatch.setattr(module.tempfile, "mkstemp", lambda **given: open(taken / "under a file"))
    with pytest.raises(InputError, match="^KDA_ENGINE_CACHE: expected a folder that can be written to, got "):
        module.cubin_path("kernels/triple.cu", (), "sm_90a")


def test_an_interrupted_write_leaves_nothing(tree, monkeypatch):
    def interrupted(*given):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        module.cubin_path("kernels/triple.cu", (), "sm_90a")
    assert cached(tree) == []


DAMAGES = {
    "empty": lambda content: b"", "cut": lambda content: content[: len(content) // 2],
    "digest cut": lambda content: content[:-1], "header": lambda content: bytes([content[0] ^ 255]) + content[1:],
    "code": lambda content: content[:500] + bytes([content[500] ^ 1]) + content[501:],
    "digest": lambda content: content[:-1] + bytes([content[-1] ^ 1]), "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_made_anew(tree, damage):
    path = module.cubin_path("kernels/triple.cu", (), "sm_90a")
    whole, code = path.read_bytes(), module.cubin("kernels/triple.cu", (), "sm_90a")
    assert whole.startswith(code) and code[:4] == b"\x7fELF"
    path.write_bytes(DAMAGES[damage](whole))
    assert module.cubin("kernels/triple.cu", (), "sm_90a") == code
    assert path.read_bytes() == whole and cached(tree) == [path.name]


def test_an_entry_is_on_the_disk_before_it_has_its_name(tree, monkeypatch):
    done = []
    fsync, replace = module.os.fsync, module.os.replace
    monkeypatch.setattr(module.os, "fsync", lambda file: done.append("fsync") or fsync(file))
    monkeypatch.setattr(module.os, "replace", lambda *given: done.append("replace") or replace(*given))
    module.cubin_path("kernels/triple.cu", (), "sm_90a")
    assert done == ["fsync", "replace"]


def test_a_user_without_a_home_is_told_of_the_variable(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    for name in ("KDA_ENGINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.Path, "home", nobody)
    with pytest.raises(InputError, match="^KDA_ENGINE_CACHE: expected the folder for compiled kernels, got none"):
        module.cache_folder()
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert module.cache_folder() == Path("/somewhere/kda_engine")


def test_what_the_compiler_refuses_is_told(tree):
    (tree / "sources" / "kernels" / "triple.cu").write_text(KERNEL.replace("kFactor *", "kFacter *"))
    with pytest.raises(build.BuildError, match="kernels/triple.cu for sm_90a(.|\n)*kFacter"):
        module.cubin_path("kernels/triple.cu", (), "sm_90a")
    assert cached(tree) == []


def test_parameters_and_resources_are_read_from_what_was_compiled(tree):
    code, log = build.compile_file("kernels/triple.cu", (), "sm_90a")
    assert cubin.parameter_sizes(code, "triple") == [8, 4, 8]
    used = build.resources(log)["triple"]
    assert used.registers > 0 and used.spill_stores == used.spill_loads == used.stack == 0


@pytest.mark.parametrize("counts", ([7], [0], [1, 0, 13, 2], [0, 0], [100, 99, 1], []))
@pytest.mark.parametrize("length", (1, 3, 50))
def test_spans_cover_every_chunk_once_in_order(counts, length):
    chunks, of = plan.cut_spans(np.array(counts, dtype=np.int64), length)
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(int)
    assert sorted(set(of)) == list(range(len(counts)))
    for n in range(len(counts)):
        first, behind = chunks[:, of == n]
        assert first[0] == offsets[n] and behind[-1] == offsets[n + 1] and (first[1:] == behind[:-1]).all()
        sizes = behind - first
        assert sizes.max() <= length and (sizes.max() - sizes.min() <= 1)


def test_few_long_sequences_are_cut_and_many_are_not():
    length = lambda *counts: plan.span_length(np.array(counts), 16, 128, 128, 132)
    assert length(512) < 512
    assert length(*[512] * 32) is None
    assert length(4) is None and length(0) is None


def test_a_variant_fits_its_target():
    for target in KNOWN.values():
        for K in (1, 64, 65, 128, 200, 256):
            chosen = variant("bfloat16", K, target)
            assert chosen.key_size >= K
            assert KERNELS["forward"].shared(chosen) + 1024 <= target.shared_limit


def test_grids_cover_what_they_should():
    sizes = {"count": 5, "value_heads": 3, "value_size": WIDE_COLUMNS + 1, "key_size": 64}
    assert KERNELS["forward"].blocks(sizes) == 5 * 3 * 2
    assert KERNELS["summary"].blocks(sizes | {"transition": None}) == 5 * 3 * 2
    assert KERNELS["summary"].blocks(sizes | {"transition": 1}) == 5 * 3 * 3
    assert KERNELS["prepare"].blocks(sizes) == 5 * 3
