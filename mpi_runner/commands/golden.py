"""`golden`: files that hold a problem and the reference's results, and engines held against them."""

import json
import os
import sys

import kda_engine
from kda_engine import cases
from kda_engine.bench.plots import require_matplotlib
from kda_engine.compare import TIERS
from kda_engine.engines import ENGINES
from kda_engine.errors import InputError
from kda_engine.hdf5.golden import GoldenError, upgrade_golden
from kda_engine.hdf5.manifest import read_manifest, record

from ..exit_codes import GOLDEN, MISMATCH, NOTHING_COMPARED, PASS
from ..goldens import making
from ..goldens.heat_map import write_heat_map
from ..goldens.junit import write_junit
from ..goldens.sources import File, OneProcess, Ranks, read_listed
from ..goldens.telling import as_json, as_line, as_refusal, as_table
from ..launched import launched, launched_rank

# The goldens that come with the source tree: beside the packages, or where the installed program is called.
BESIDE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(kda_engine.__file__))), "data")
DATA = BESIDE if os.path.isdir(BESIDE) else "data"
SIZES = ("tokens", "heads", "value_heads", "K", "V", "sequences")


def add(subparsers):
    parser = subparsers.add_parser("golden", help="make, list and check golden files")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new", help="make a golden with the reference engine",
        description="Makes OUT.h5 from a named case or an input file, with the float64 recurrence, and says what it "
                    "changes against the golden that is there. A MANIFEST.toml in OUT's folder is brought up to date. "
                    "Refused while the source tree has uncommitted changes.")
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
        "check", help="hold an engine's results, or an output file, against goldens",
        description="Under mpirun the engine works over all ranks, as `run` does. Nothing is written but what --junit "
                    "and --plot name. Exit code 0: all within tolerance; 1: some are not; 3: a golden is missing, "
                    "damaged or of another version; 77: nothing was compared. Goldens of types that the engine does "
                    "not take are told and passed over.")
    check.add_argument("files", nargs="*", metavar="FILE", help="(all of the source tree's data/)")
    who = check.add_mutually_exclusive_group()
    who.add_argument("--engine", default="auto", choices=(*ENGINES, "auto"), help="who computes (auto)")
    who.add_argument("--output", metavar="OUT.h5", help="judge this output, made anywhere, by one golden")
    check.add_argument("--tier", choices=TIERS, help="which of the golden's tolerances (by the narrowest type)")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument("--junit", metavar="FILE.xml", help="write a JUnit report")
    check.add_argument("--plot", metavar="FILE.png", help="write a picture of the errors over heads and blocks")
    check.set_defaults(run=check_goldens)
    upgrade = actions.add_parser(
        "upgrade", help="rewrite goldens of an older form",
        description="Inputs and results stay bit for bit; what today's form holds beside them is added. Goldens that "
                    "need nothing are left alone.")
    upgrade.add_argument("files", nargs="*", metavar="FILE", help="(all of the source tree's data/)")
    upgrade.set_defaults(run=upgrade_goldens)


def new_golden(args):
    """Make one golden; returns the exit code."""
    making.refuse_dirty_tree()
    given = {name: value for name in ("dtype", "seed", *SIZES) if (value := getattr(args, name)) is not None}
    print("\n".join(making.make(args.source, args.output, given, args.force)))
    return PASS


def list_goldens(args):
    """Print one line a golden; returns the exit code."""
    code = PASS if (paths := _paths(args.files)) else NOTHING_COMPARED
    for path in paths:
        try:
            golden = read_listed(path)
        except GoldenError as error:
            _complain(error)
            code = GOLDEN
            continue
        case = golden.case
        (T, H, K), (HV, V) = case.q.shape, case.v.shape[1:]
        print(f"{os.path.basename(path):28} {case.name:22} {case.v.dtype.name:9} T={T} H={H} HV={HV} K={K} V={V} "
              f"N={len(case.cu_seqlens) - 1} gate={case.options.gate} beta={case.options.beta} "
              f"tolerance={golden.tolerance:.0e} tensors={len(golden.results)}")
    return code


def check_goldens(args):
    """Hold one engine, or one output file, against goldens; returns the exit code."""
    if args.plot is not None:
        require_matplotlib()
    if args.output is not None:
        if len(args.files) != 1:
            raise InputError(f"--output: expected one golden to judge it by, got {len(args.files)}")
        return _check(args, File(args.output))
    if not launched():
        return _check(args, OneProcess(args.engine))
    # MPI starts with this import, only where a launcher wants it.
    from ..session import Session

    code = PASS
    with Session() as session:
        code = session.control.largest(_check(args, Ranks(session, args.engine)), "agreeing on the verdict")
    return session.code or code


def upgrade_goldens(args):
    """Rewrite goldens of an older form; returns the exit code."""
    code = PASS if (paths := _paths(args.files)) else NOTHING_COMPARED
    for path in paths:
        folder, name = os.path.split(os.path.abspath(path))
        try:
            upgraded = upgrade_golden(path)
            if upgraded and (entry := read_manifest(folder).get(name)) is not None:
                record(path, entry.case, entry.made)
        except GoldenError as error:
            _complain(error)
            code = GOLDEN
            continue
        print(f"{path}: {'upgraded' if upgraded else 'up to date'}")
    return code


def _check(args, source):
    """Judge all goldens, tell what was found; the exit code (on ranks beside the first it means nothing)."""
    judgements, paths = [], _paths(args.files)
    for path in paths:
        judgement = source.judge(path, args.tier)
        if judgement is None:
            continue
        judgements.append(judgement)
        if judgement.error is not None:
            _complain(judgement.error)
        elif not args.json and judgement.refused is not None:
            print(as_refusal(judgement))
        elif not args.json:
            print(as_line(judgement) if judgement.passed and len(paths) > 1 else as_table(judgement))
    refused = sum(judgement.refused is not None for judgement in judgements)
    if len(paths) > 1 and not args.json:
        print(f"{sum(judgement.passed for judgement in judgements)} of {len(paths)} goldens pass"
              + (f", {refused} were not compared" if refused else ""))
    if launched_rank() == 0:
        _write_reports(args, judgements)
    if any(judgement.error is not None for judgement in judgements):
        return GOLDEN
    if not all(judgement.passed or judgement.refused is not None for judgement in judgements):
        return MISMATCH
    if not any(judgement.compared for judgement in judgements) and launched_rank() == 0:
        print("kda-engine: nothing was compared" + ("" if args.files else f": no goldens in {os.path.abspath(DATA)}"),
              file=sys.stderr)
        return NOTHING_COMPARED
    return PASS


def _write_reports(args, judgements):
    if args.json:
        print(json.dumps([as_json(judgement) for judgement in judgements], indent=1))
    for path, write in ((args.junit, write_junit), (args.plot, write_heat_map)):
        if path is None:
            continue
        try:
            write(path, judgements)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _complain(error):
    if launched_rank() == 0:
        print(f"kda-engine: error: {error}", file=sys.stderr)


def _paths(files):
    return files or [os.path.join(DATA, name) for name in read_manifest(DATA)]
