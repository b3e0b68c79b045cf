"""Which module may import which: the direction of the architecture, and what stays unloaded until it is asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Modules and packages of kda_engine by layer; a module may import from earlier layers, and from its own.
LAYERS = [
    {"errors", "version", "threads", "subnormals"},
    {"misnamed", "options"},
    {"arrays", "chunk_table", "regular_file"},
    {"layout", "compare"},
    {"gate", "affine", "cases"},
    {"layer", "capture_files", "captured"},
    {"reference", "scan", "chunked", "partition", "decay", "conv", "finite", "chunk_states"},
    {"device", "hdf5"},
    {"engines"},
    {"api"},
    {"bench", "compat", "evaluation"},
]
LAYER = {name: number for number, layer in enumerate(LAYERS) for name in layer}

# Paths that may import CuPy when they are imported themselves, or only once a function runs.
CUPY_AT_THE_TOP = ("engines/cuda", "device/", "bench/")
CUPY_IN_FUNCTIONS = ("engines/", "device/", "bench/", "arrays.py")
CUPY_IN_MPI_RUNNER = ("parallel/staged.py", "session.py", "environment.py", "commands/bench")
# Frameworks of other kernels, for the side-by-side benchmark alone.
FRAMEWORKS = ("torch", "jax", "triton", "fla", "cudnn")


def modules(package):
    return sorted(path for path in (ROOT / package).rglob("*.py"))


def imports(path):
    """(absolute module name, whether at the top of the file) of every import in a file, relative ones resolved."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    tree = ast.parse(path.read_text())
    top = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in top
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            yield ".".join(base), id(node) in top
            for alias in node.names:
                yield ".".join([*base, alias.name]), id(node) in top


def inside(path, package):
    return path.relative_to(ROOT / package).as_posix()


@pytest.mark.parametrize("path", modules("kda_engine"), ids=lambda p: inside(p, "kda_engine"))
def test_imports_point_one_way(path):
    mine = inside(path, "kda_engine").split("/")[0].removesuffix(".py")
    if mine == "__init__":
        return
    assert mine in LAYER, f"{mine}: not in the picture of the architecture"
    for name, _ in imports(path):
        parts = name.split(".")
        assert parts[0] != "mpi_runner", f"{path}: imports {name}"
        if parts[0] != "kda_engine" or len(parts) < 2:
            continue
        assert LAYER.get(parts[1], -1) <= LAYER[mine], f"{path}: imports {name} from a later layer"
        if mine in ("cases", "compare", "hdf5"):
            assert parts[1] not in ("engines", "device"), f"{path}: imports {name}"
        if mine not in ("engines", "device", "bench"):
            assert parts[1] != "device", f"{path}: imports {name}"


@pytest.mark.parametrize("mine, other", (("portable", "fused"), ("fused", "portable")))
def test_paths_know_nothing_of_each_other(mine, other):
    """Of the kernels' two families neither needs the other's modules."""
    found = [path for folder in ("engines", "device") for path in (ROOT / "kda_engine" / folder).rglob(f"{mine}*.py")]
    assert found
    for path in found:
        named = [name for name, _ in imports(path) if name.split(".")[-1].startswith(other)
                 or any(part.startswith(other) for part in name.split(".")[:-1])]
        assert not named, f"{path}: imports {named}"


@pytest.mark.parametrize("path", modules("kda_engine") + modules("mpi_runner"),
                         ids=lambda p: p.relative_to(ROOT).as_posix())
def test_third_parties_stay_in_their_rooms(path):
    package = path.relative_to(ROOT).parts[0]
    place = inside(path, package)
    for name, at_top in imports(path):
        library = name.split(".")[0]
        if library in FRAMEWORKS:
            assert package == "kda_engine" and place.startswith("bench/peers"), f"{place}: imports {name}"
        if library == "cupy":
            rooms = (CUPY_IN_MPI_RUNNER if package == "mpi_runner"
                     else CUPY_AT_THE_TOP if at_top else CUPY_IN_FUNCTIONS)
            assert place.startswith(rooms) and not (at_top and package == "mpi_runner"), f"{place}: imports {name}"
        if library == "h5py":
            assert package == "kda_engine" and place.startswith("hdf5/"), f"{place}: imports h5py"
        if library == "mpi4py":
            assert package == "mpi_runner", f"{place}: imports mpi4py"


@pytest.mark.parametrize("path", modules("mpi_runner/parallel"), ids=lambda p: inside(p, "mpi_runner"))
def test_the_problem_in_memory_knows_no_files_and_routes_no_transport(path):
    place = inside(path, "mpi_runner/parallel")
    for name, _ in imports(path):
        assert not name.startswith(("h5py", "kda_engine.hdf5")), f"{place}: imports {name}"
        parts = name.split(".")
        if parts[0] == "mpi_runner" and len(parts) > 1:
            # Of the rest of the driver only the clock, which knows nobody, and the door to MPI.
            assert parts[1] in ("parallel", "clock", "mpi"), f"{place}: imports {name}"
        if place.startswith("routes/"):
            assert not name.startswith(("mpi4py", "mpi_runner.mpi", "mpi_runner.parallel.transports", "mpi_runner.parallel.control"))


def test_the_scan_sees_what_it_looks_for():
    """The rules above are only as good as the list of imports: relative, nested and renamed ones must show up."""
    path = ROOT / "kda_engine" / "engines" / "host.py"
    found = dict(imports(path))
    assert found["kda_engine.gate.activate"] and found["kda_engine.engines.base"] and found["kda_engine.chunked"]
    nested = dict(imports(ROOT / "kda_engine" / "engines" / "__init__.py"))
    assert nested["kda_engine.engines.reference.ReferenceEngine"] is False


def loaded_by(code):
    """Names of the modules a fresh interpreter has loaded after running `code`."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_importing_the_engine_loads_no_heavy_library():
    loaded = loaded_by("import kda_engine")
    assert "kda_engine.api" in loaded and not loaded & {"cupy", "mpi4py", "h5py", "scipy", "kda_engine.engines.cuda"}


def test_the_engine_names_the_driver_once():
    """`kda_engine.distributed` is the driver's, handed on by the package's front door when it is asked for."""
    names = [path for path in modules("kda_engine") if "mpi_runner" in path.read_text()
             and any(isinstance(node, ast.Constant) and str(node.value).startswith("mpi_runner")
                     for node in ast.walk(ast.parse(path.read_text())))]
    assert [inside(path, "kda_engine") for path in names] == ["__init__.py"]
    assert "mpi4py" not in loaded_by("import kda_engine; kda_engine.forward")
    assert "mpi_runner.distributed" in loaded_by("import kda_engine; kda_engine.distributed")


def test_a_computation_needs_neither_files_nor_mpi():
    loaded = loaded_by("import numpy as np, kda_engine as kda\n"
                       "x = np.ones((3, 1, 2), 'f4')\n"
                       "kda.backward(kda.forward(x, x, x, x, x[..., 0], engine='numpy'), x)")
    assert not loaded & {"cupy", "mpi4py", "h5py"}


@pytest.mark.parametrize("command", ["input", "plan", "info"])
def test_commands_without_ranks_do_not_load_mpi(command):
    loaded = loaded_by(f"import mpi_runner.commands.{command}, argparse\n"
                       f"mpi_runner.commands.{command}.add(argparse.ArgumentParser().add_subparsers())")
    assert "mpi4py.MPI" not in loaded and "cupy" not in loaded
