"""`run`: the main job under mpirun (or on one process)."""

import argparse
import json

from kda_engine.options import DECAY_SKIPS

from .. import operator_options
from ..exit_codes import MISMATCH
from ..job import CHOICES, NOT_BUILT, Job
from ..lifetime import seconds_since_start
from ..starting import start


def add(subparsers):
    parser = subparsers.add_parser(
        "run", help="forward (and backward) of an input file over all ranks", argument_default=argparse.SUPPRESS,
        description="Reads each rank's share of INPUT, runs forward (and backward), writes one OUTPUT.")
    parser.add_argument("input", metavar="INPUT.h5", help="an input file; `input` makes one")
    parser.add_argument("output", metavar="OUTPUT.h5", help="the file that is made")
    switch = lambda name, text: parser.add_argument(f"--{name}", action="store_true", help=text)
    switch("backward", "also compute all gradients; the input must hold d_out (forward alone)")
    parser.add_argument("--engine", choices=CHOICES["engine"],
                        help="who computes (auto: cuda where a device can be used, else numpy)")
    parser.add_argument("--scan", choices=CHOICES["scan"],
                        help="how boundary states go from rank to rank (auto)")
    parser.add_argument("--transport", choices=CHOICES["transport"], metavar=_built("transport"),
                        help="how data are sent between ranks (auto)")
    parser.add_argument("--shard", metavar="{tokens,heads}", help="what each rank takes of the input (tokens)")
    parser.add_argument("--decay-skip", choices=DECAY_SKIPS,
                        help="when to drop a transition (certified where the tolerance is above 0, else exact)")
    parser.add_argument("--tolerance", type=float, metavar="X",
                        help="bound on the norm of a dropped transition, in [0, 1) (0)")
    switch("reproducible", "the same bits at every rank count (engines on the host, exact decay skip)")
    switch("check-finite", "look for NaN, infinities and positive log decay in the input first (do not look)")
    switch("require-finite", "exit code 1 where a result holds NaN or an infinity; the output is written (code 0)")
    switch("allow-external", "read what the input links to in other files or keeps outside HDF5 files (refuse)")
    switch("save-boundary", "write the ranks' boundary matrices too")
    parser.add_argument("--io", choices=CHOICES["io"],
                        help="how the output is written: direct: one file, each rank its rows; gather: one file through "
                             "rank 0; shards: one file a rank; auto: direct where all ranks see the file, else gather (auto)")
    switch("oversubscribe", "allow several ranks on one GPU (refuse)")
    parser.add_argument("--exchange-timeout", type=float, metavar="S",
                        help="longest wait without a sign of life of all ranks, in seconds (600)")
    switch("dry-run", "check everything, print the plan, compute nothing")
    switch("json", "print one JSON object: the output's report (a text)")
    parser.add_argument("--config", metavar="JOB.toml", help="the same options from a file; the command line wins (none)")
    switch("force", "replace an existing output (refuse)")
    operator = parser.add_argument_group("operator options", "fixed by the input file; a value here must agree with it")
    operator_options.add(operator)
    parser.set_defaults(run=main)


def _built(option):
    """The values of an option that a help text shows."""
    return "{" + ",".join(value for value in CHOICES[option] if value not in NOT_BUILT[option]) + "}"


def main(args):
    given = {name: value for name, value in vars(args).items() if name not in ("run", "command", "config")}
    job = Job.resolve(given, getattr(args, "config", None))
    # A wrong command line is told before MPI starts.
    start(job.exchange_timeout)
    from ..main_job import run_job
    from ..report import summary
    from ..session import Session

    with Session(job.exchange_timeout) as session:
        report = run_job(session, job)
        if report is not None:
            wall = seconds_since_start()
            print(json.dumps({"output": job.output, "wall_seconds": wall, **report}) if job.json
                  else summary(report, job.output, wall))
        lost = job.require_finite and bool(report and report["not_finite"])
        # The same code on every rank.
        if session.control.largest(int(lost), "agreeing on the exit code"):
            session.code = MISMATCH
    return session.code
