"""`run`: the main job under mpirun (or on one process)."""

import argparse

from ..job import CHOICES, Job


def add(subparsers):
    parser = subparsers.add_parser(
        "run", help="forward (and backward) of an input file over all ranks", argument_default=argparse.SUPPRESS,
        description="Reads each rank's share of INPUT, runs forward (and backward), writes one OUTPUT.")
    parser.add_argument("input", metavar="INPUT.h5")
    parser.add_argument("output", metavar="OUTPUT.h5")
    switch = lambda name, text: parser.add_argument(f"--{name}", action="store_true", help=text)
    switch("backward", "also compute all gradients; the input must hold d_out")
    parser.add_argument("--engine", choices=CHOICES["engine"], help="who computes (auto)")
    parser.add_argument("--scan", choices=CHOICES["scan"], help="how boundary states travel (auto)")
    parser.add_argument("--transport", choices=CHOICES["transport"], help="what carries them (auto)")
    parser.add_argument("--decay-skip", choices=("exact", "certified", "sampled"), help="when to drop a transition")
    parser.add_argument("--tolerance", type=float, help="bound on the norm of a dropped transition (0)")
    switch("reproducible", "the same bits at every rank count")
    switch("check-finite", "look for NaN, infinities and positive log decay first")
    switch("allow-external", "read what the input links to in other files or keeps outside HDF5 files")
    switch("save-boundary", "write the ranks' boundary matrices too")
    parser.add_argument("--io", choices=CHOICES["io"],
                        help="how the output is written: direct: one file, each rank its rows; gather: one file through "
                             "rank 0; shards: one file a rank; auto: direct where all ranks see the file, else gather (auto)")
    switch("oversubscribe", "allow several ranks on one GPU")
    parser.add_argument("--exchange-timeout", type=float, metavar="S",
                        help="longest wait without a sign of life of all ranks, seconds (600)")
    switch("dry-run", "check everything, print the plan, compute nothing")
    parser.add_argument("--config", metavar="JOB.toml", help="the same options from a file; the command line wins")
    switch("force", "replace an existing output")
    operator = parser.add_argument_group("operator options", "fixed by the input file; a value here must agree with it")
    operator.add_argument("--gate")
    operator.add_argument("--lower-bound", type=float)
    operator.add_argument("--beta")
    operator.add_argument("--qk-l2norm", type=int)
    operator.add_argument("--scale", type=float)
    operator.add_argument("--state-layout")
    parser.set_defaults(run=main)


def main(args):
    given = {name: value for name, value in vars(args).items() if name not in ("run", "command", "config")}
    job = Job.resolve(given, getattr(args, "config", None))
    # MPI starts with these imports; a wrong command line is told before.
    from ..main_job import run_job
    from ..report import summary
    from ..session import Session

    with Session() as session:
        report = run_job(session, job)
        if report is not None:
            print(summary(report, job.output))
    return session.code
