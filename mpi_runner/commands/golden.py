"""`golden`: files that hold a problem and the reference's results, and engines held against them."""

import json
import os
import sys

from kda_engine import cases
from kda_engine.bench.plots import require_matplotlib
from kda_engine.compare import TIERS
from kda_engine.engines import ENGINES
from kda_engine.errors import InputError
from kda_engine.hdf5.golden import GoldenError, upgrade_golden
from kda_engine.hdf5.manifest import read_manifest, record

from ..exit_codes import GOLDEN, MISMATCH, NOTHING_COMPARED, PASS
from ..goldens import making, suite
from ..goldens.finding import find, shipped
from ..goldens.heat_map import write_heat_map
from ..goldens.junit import write_junit
from ..goldens.sources import File, Files, OneProcess, Ranks, read_listed
from ..goldens.telling import as_json, as_line, as_refusal, as_table
from ..launched import launched, launched_rank

SIZES = ("tokens", "heads", "value_heads", "K", "V", "sequences")
SUITE_SIZES = {"tokens": "tokens in all", "heads": "query/key heads", "value_heads": "value heads",
               "K": "key head size", "V": "value head size"}
FILES = "a golden, or a folder of goldens (all that come with the program)"


def add(subparsers):
    parser = subparsers.add_parser("golden", help="make, list and check golden files")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser(
        "new", help="make a golden with the reference engine",
        description="Makes OUT.h5 from a named case or an input file, with the float64 recurrence. If OUT.h5 exists, "
                    "says what changes against it. Brings a MANIFEST.toml in OUT's folder up to date. Refuses to work "
                    "while the source tree has uncommitted changes.")
    new.add_argument("source", metavar="CASE|INPUT.h5", help=f"one of {', '.join(cases.names())}; or a file")
    new.add_argument("output", metavar="OUT.h5")
    new.add_argument("--dtype", help="type of a case's per-token arrays (float32)")
    new.add_argument("--seed", type=int, help="seed of a case's numbers (0)")
    for size in SIZES:
        new.add_argument(f"--{size.replace('_', '-')}", type=int, metavar="N", help="size of a case (the case's own)")
    new.add_argument("--lengths", type=_lengths, metavar="N,N,...", help="tokens of each sequence of a case (the case's own)")
    new.add_argument("--force", action="store_true", help="replace an existing file")
    new.set_defaults(run=new_golden)
    whole = actions.add_parser(
        "suite", help="make goldens of all named cases at another kernel's sizes",
        description="Makes FOLDER/CASE.h5 for every named case, and FOLDER/MANIFEST.toml. A size that is not given is "
                    "the case's own. --tokens changes the lengths of a case's sequences in proportion; cases that are "
                    "about lengths keep theirs. Cases that differ only in a size that is given are made once.")
    whole.add_argument("folder", metavar="FOLDER")
    whole.add_argument("--dtype", help="type of the per-token arrays: bfloat16, float16, float32 or float64 (float32)")
    whole.add_argument("--seed", type=int, metavar="N", help="seed of the numbers (0)")
    for size, what in SUITE_SIZES.items():
        whole.add_argument(f"--{size.replace('_', '-')}", type=int, metavar="N", help=f"{what} of every case (the case's own)")
    whole.add_argument("--force", action="store_true", help="replace existing files")
    whole.set_defaults(run=make_suite)
    listing = actions.add_parser("list", help="list the contents of goldens")
    listing.add_argument("files", nargs="*", metavar="FILE", help=FILES)
    listing.set_defaults(run=list_goldens)
    check = actions.add_parser(
        "check", help="compare an engine's results, or an output file, with goldens",
        description="Under mpirun the engine works over all ranks, as `run` does. Only the files of --junit and "
                    "--plot are written. Exit code 0: all are within tolerance; 1: some are not; 3: a golden is "
                    "missing, damaged or of another version; 77: nothing was compared. Goldens that the engine does "
                    "not take, or that have no output in the folder of --outputs, are named and skipped.")
    check.add_argument("files", nargs="*", metavar="FILE", help=FILES)
    who = check.add_mutually_exclusive_group()
    who.add_argument("--engine", default="auto", choices=(*ENGINES, "auto"), help="engine that computes (auto)")
    who.add_argument("--output", metavar="OUT.h5", help="judge this output, made anywhere, by one golden (the engine computes)")
    who.add_argument("--outputs", metavar="FOLDER", help="judge FOLDER/NAME.h5, made anywhere, by the golden NAME.h5 (the engine computes)")
    check.add_argument("--tier", choices=TIERS, help="tolerance of the golden to use (by the narrowest type)")
    check.add_argument("--json", action="store_true", help="print JSON")
    check.add_argument("--junit", metavar="FILE.xml", help="write a JUnit report (none)")
    check.add_argument("--plot", metavar="FILE.png", help="write a picture of the errors over heads and blocks (none)")
    check.set_defaults(run=check_goldens)
    upgrade = actions.add_parser(
        "upgrade", help="rewrite goldens of an older form",
        description="Inputs and results stay the same bit for bit. Entries that only the present form has are added. "
                    "Goldens in the present form are not changed.")
    upgrade.add_argument("files", nargs="*", metavar="FILE", help=FILES)
    upgrade.set_defaults(run=upgrade_goldens)


def new_golden(args):
    """Make one golden; returns the exit code."""
    making.refuse_dirty_tree()
    print("\n".join(making.make(args.source, args.output, _given(args, *SIZES, "lengths"), args.force)))
    return PASS


def make_suite(args):
    """Make a folder of goldens; returns the exit code."""
    making.refuse_dirty_tree()
    tell = lambda lines: print("\n".join(lines), flush=True)
    count = suite.make_suite(args.folder, _given(args, *SUITE_SIZES), args.force, tell)
    print(f"{args.folder}: {count} goldens")
    return PASS


def list_goldens(args):
    """Print one line a golden; returns the exit code."""
    code, paths = PASS, find(args.files)
    if not paths:
        _say_that_none_are_here()
        return NOTHING_COMPARED
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
    if not args.files:
        print(f"{len(paths)} goldens in {shipped()}")
    return code


def check_goldens(args):
    """Hold one engine, or one output file, against goldens; returns the exit code."""
    if args.plot is not None:
        require_matplotlib()
    if args.output is not None:
        if len(args.files) != 1:
            raise InputError(f"--output: expected one golden to judge it by, got {len(args.files)}")
        return _check(args, File(args.output))
    if args.outputs is not None:
        outputs = Files(args.outputs)
        # Who names single goldens wants those alone.
        if all(os.path.isdir(name) for name in args.files):
            outputs.refuse_unjudged(find(args.files))
        return _check(args, outputs)
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
    code, paths = PASS, find(args.files)
    if not paths:
        _say_that_none_are_here()
        return NOTHING_COMPARED
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
    judgements, paths = [], find(args.files)
    if not paths:
        _say_that_none_are_here()
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
        print("kda-engine: nothing was compared", file=sys.stderr)
        return NOTHING_COMPARED
    return PASS


def _write_reports(args, judgements):
    if args.json:
        print(json.dumps([as_json(judgement) for judgement in judgements], indent=1))
    for path, write in ((args.junit, write_junit), (args.plot, write_heat_map)):
        if path is None:
            continue
        try:
            written = write(path, judgements)
            if written and not args.json:
                print("wrote " + ", ".join(map(str, written)))
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None


def _complain(error):
    if launched_rank() == 0:
        print(f"kda-engine: error: {error}", file=sys.stderr)


def _say_that_none_are_here():
    if launched_rank() == 0:
        print(f"kda-engine: no goldens in {shipped()}, where those that come with the program belong", file=sys.stderr)


def _given(args, *names):
    return {name: value for name in ("dtype", "seed", *names) if (value := getattr(args, name)) is not None}


def _lengths(text):
    """argparse's type of --lengths; ValueError is what it turns into a message."""
    return tuple(int(word) for word in text.split(","))
