"""The record of the last run of the GPU tests: `python -m tests.gpu_record [--output FILE]`, on a machine with a device.

It says which sources were tested, so that a test without a device can tell when they have changed since: their code,
not their comments.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from code_digest import digest  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "tests" / "gpu_record.json"

SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")


def tested_files():
    """Everything a kernel launch depends on: kernels of the table with their headers, the device code, the engine."""
    from kda_engine.device.kernels import KERNELS
    from kda_engine.device.kernels.probes import PROBES
    from kda_engine.device.sources import reachable

    kernels = {f"kernels_cu/{name}" for kernel in (KERNELS | PROBES).values() for name in reachable(kernel.file)}
    host = {str(path.relative_to(ROOT)) for pattern in ("kda_engine/device/**/*.py", "kda_engine/engines/cuda/**/*.py")
            for path in ROOT.glob(pattern)}
    return sorted(kernels | host)


def digests():
    """SHA-256 of each tested file's code, in hex, by its path."""
    return {name: digest(ROOT / name) for name in tested_files()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RECORD)
    parser.add_argument("--workers", type=int, default=0, help="test processes side by side (needs pytest-xdist)")
    arguments = parser.parse_args()
    running = _start_sanitizers()
    record = {"date": datetime.now(timezone.utc).isoformat(timespec="seconds"), **_environment(),
              "tests": _tests(arguments.workers), "sanitizers": _verdicts(running), "files": digests()}
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: x for name, x in record.items() if name != "files"}, indent=1))
    passed = record["tests"]["passed"] == record["tests"]["run"] > 0
    return 0 if passed and set(record["sanitizers"].values()) <= {"clean"} else 1


def _environment():
    import cupy
    from cupy.cuda import nvrtc, runtime

    properties = runtime.getDeviceProperties(0)
    return {"device": properties["name"].decode(), "driver": runtime.driverGetVersion(),
            "nvrtc": ".".join(str(x) for x in nvrtc.getVersion()), "cupy": cupy.__version__}


def _tests(workers):
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        side_by_side = ["-n", str(workers)] if workers else []
        subprocess.run([sys.executable, "-m", "pytest", "tests/gpu", "-q", f"--junitxml={report}", *side_by_side],
                       cwd=ROOT, check=False)
        suite = ElementTree.parse(report).getroot().find("testsuite")
    count = {name: int(suite.get(name)) for name in ("tests", "failures", "errors", "skipped")}
    run = count["tests"] - count["skipped"]
    return {"run": run, "passed": run - count["failures"] - count["errors"], "skipped": count["skipped"]}


def _start_sanitizers():
    """tool -> the process that runs tests/gpu/sanitize.py under it; empty where compute-sanitizer is not installed."""
    if shutil.which("compute-sanitizer") is None:
        return {}
    # The chain has 36 barriers a block, more than synccheck keeps track of unasked.
    more = {"synccheck": ["--num-cuda-barriers", "8192"]}
    return {tool: subprocess.Popen(["compute-sanitizer", "--tool", tool, *more.get(tool, ()), "--error-exitcode", "1",
                                    sys.executable, "-m", "tests.gpu.sanitize"],
                                   cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for tool in SANITIZERS}


def _verdicts(running):
    verdicts = {}
    for tool, process in running.items():
        log, _ = process.communicate()
        verdicts[tool] = "clean" if process.returncode == 0 else "not clean"
        if process.returncode:
            print(f"{tool}:\n{log[-4000:]}")
    return verdicts


if __name__ == "__main__":
    sys.exit(main())
