"""`golden`: files that hold a problem and the reference's results, and engines held against them."""

import json
import os
import shlex
import sys

import kda_engine
from kda_engine import cases
from kda_engine.compare import block_starts, difference
from kda_engine.engines import ENGINES
from kda_engine.errors import InputError
from kda_engine.evaluation import evaluate, reference
from kda_engine.hdf5.golden import GoldenError, read_golden, write_golden
from kda_engine.hdf5.inputs import InputFile
from kda_engine.hdf5.manifest import check_listed, read_manifest, record
from kda_engine.hdf5.schema import STATE_RESULTS, TOKEN_RESULTS

from ..difference_table import as_json, failure_row, render, table_row
from ..exit_codes import GOLDEN, MISMATCH, NOTHING_COMPARED, PASS
from ..provenance import provenance

# The goldens that come with the source tree.
DATA = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(kda_engine.__file__))), "data")
SIZES = ("tokens", "heads", "value_heads", "K", "V", "sequences")


def add(subparsers):
    parser = subparsers.add_parser("golden", help="make, list and check golden files")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new", help="make a golden with the reference engine",
        description="Makes OUT.h5 from a named case or an input file, with the float64 recurrence. A MANIFEST.toml in "
                    "OUT's folder is brought up to date.")
    new.add_argument("source", metavar="CASE|INPUT.h5", help=f"one of {', '.join(cases.names())}; or a file")
    new.add_argument("output", metavar="OUT.h5")
    new.add_argument("--dtype", help="of a case's per-token arrays (float32)")
    new.add_argument("--seed", type=int, help="of a case's numbers (0)")
    for size in SIZES:
        new.add_argument(f"--{size.replace('_', '-')}", type=int, help="of a case; its own when not given")
    new.add_argument("--force", action="store_true", help="replace an existing file")
    new.set_defaults(run=new_golden)
    listing = actions.add_parser("list", help="what goldens hold")
    listing.add_argument("files", nargs="*", metavar="FILE", help="(all of the source tree's data/)")
    listing.set_defaults(run=list_goldens)
    check = actions.add_parser(
        "check", help="hold an engine's results against goldens",
        description="Exit code 0: all within tolerance; 1: some are not; 3: a golden is missing, damaged or of another "
                    "version; 77: nothing was compared.")
    check.add_argument("files", nargs="*", metavar="FILE", help="(all of the source tree's data/)")
    check.add_argument("--engine", default="auto", choices=(*ENGINES, "auto"), help="who computes (auto)")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.set_defaults(run=check_goldens)


def new_golden(args):
    """Make one golden; returns the exit code."""
    given = {name: value for name in ("dtype", "seed", *SIZES) if (value := getattr(args, name)) is not None}
    if os.path.exists(args.source) or args.source.endswith(".h5"):
        if given:
            raise InputError(f"--{min(given)}: expected only with a named case, got the file {args.source}")
        with InputFile(args.source) as file:
            case = file.read_case(os.path.splitext(os.path.basename(args.source))[0])
    else:
        case = cases.make(args.source, **given)
    results = reference(case)
    write_golden(args.output, case, results, provenance(("numpy", "h5py", "ml_dtypes")), args.force)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    record(args.output, case.name, shlex.join(
        ["kda-engine", "golden", "new", args.source, os.path.basename(args.output), *flags]))
    print(f"{args.output}: {case.name}, {len(results)} tensors, {os.path.getsize(args.output)} bytes")
    return PASS


def list_goldens(args):
    """Print one line a golden; returns the exit code."""
    code = PASS if (paths := _paths(args.files)) else NOTHING_COMPARED
    for path in paths:
        try:
            golden = _read(path)
        except GoldenError as error:
            print(f"kda-engine: error: {error}", file=sys.stderr)
            code = GOLDEN
            continue
        case = golden.case
        (T, H, K), (HV, V) = case.q.shape, case.v.shape[1:]
        print(f"{os.path.basename(path):28} {case.name:22} {case.v.dtype.name:9} T={T} H={H} HV={HV} K={K} V={V} "
              f"N={len(case.cu_seqlens) - 1} gate={case.options.gate} beta={case.options.beta} "
              f"tolerance={golden.tolerance:.0e} tensors={len(golden.results)}")
    return code


def check_goldens(args):
    """Hold one engine against goldens; returns the exit code."""
    code, compared, told = PASS, 0, []
    for path in _paths(args.files):
        try:
            golden = _read(path)
        except GoldenError as error:
            print(f"kda-engine: error: {error}", file=sys.stderr)
            told.append({"file": path, "error": str(error)})
            code = GOLDEN
            continue
        rows, values = _hold_against(golden, args.engine)
        passed = all(row[-1] == "ok" for row in rows)
        compared += len(values)
        code = code if passed else max(code, MISMATCH)
        told.append({"file": path, "case": golden.case.name, "engine": args.engine, "pass": passed, "tensors": values})
        if not args.json:
            print(f"{path}: {golden.case.name}, engine {args.engine}\n{render(rows)}\n")
    if args.json:
        print(json.dumps(told, indent=1))
    if code == PASS and not compared:
        print("kda-engine: nothing was compared", file=sys.stderr)
        return NOTHING_COMPARED
    return code


def _hold_against(golden, engine):
    """(table rows, JSON values) of every tensor; values only of those that both sides have."""
    computed, expected = evaluate(golden.case, engine), golden.results
    rows, values = [], []
    for name in (*expected, *(name for name in computed if name not in expected)):
        if name not in computed or name not in expected:
            where = f"the results of {engine}" if name in expected else "the golden"
            rows.append(failure_row(name, f"absent in {where}"))
            continue
        found = difference(computed[name], expected[name], _starts(name, golden))
        rows.append(table_row(name, found, golden.tolerance, golden.case.cu_seqlens))
        values.append(as_json(name, found, golden.tolerance, golden.case.cu_seqlens))
    return rows, values


def _paths(files):
    return files or [os.path.join(DATA, name) for name in read_manifest(DATA)]


def _read(path):
    check_listed(path)
    return read_golden(path)


def _starts(name, golden):
    if name in STATE_RESULTS:
        return range(len(golden.results[name]))
    return block_starts(golden.case.cu_seqlens) if name in TOKEN_RESULTS else None
