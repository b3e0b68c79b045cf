"""The command line: `kda-engine COMMAND` and `python -m mpi_runner COMMAND`."""

import argparse
import contextlib
import importlib
import os
import sys
import traceback

# Nothing here loads numpy, which takes a while: signals are in order almost from the start.
from .exit_codes import GOLDEN, INTERNAL, USAGE
from .hints import hint
from .interruption import ordered_signals
from .launched import launched_rank
from .streams import forgiving_streams

COMMANDS = ("run", "input", "golden", "compare", "bench", "plan", "info", "completion")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        from .messages import one_line

        if launched_rank() == 0:
            self.print_usage(sys.stderr)
            print(f"{self.prog}: error: {one_line(message)}\n{hint(message, self)}", file=sys.stderr)
        raise SystemExit(USAGE)


def parser():
    """The parser of all commands."""
    from kda_engine.version import VERSION

    top = _Parser(prog="kda-engine", description="Kimi Delta Attention: distributed runs, goldens, benchmarks.")
    top.add_argument("--version", action="version", version=f"kda-engine {VERSION}")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name in COMMANDS:
        importlib.import_module(f".commands.{name}", __package__).add(subparsers)
    return top


def main(argv=None):
    """Run one command; returns its exit code (see exit_codes). Only the first rank prints."""
    with ordered_signals(), forgiving_streams():
        args = parser().parse_args(argv)
        try:
            return _run(args)
        except Exception:
            # Python's own exit code would be 1, which says that a comparison failed.
            traceback.print_exc()
            return INTERNAL


def _run(args):
    """The one place where what users can mend becomes a line and an exit code, whichever command raised it."""
    from kda_engine.errors import InputError
    from kda_engine.hdf5.golden import GoldenError

    try:
        _check_working_folder()
        with contextlib.ExitStack() as stack:
            if launched_rank() != 0:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            return args.run(args)
    except (GoldenError, InputError) as error:
        return _refuse(error, GOLDEN if isinstance(error, GoldenError) else USAGE)
    except MemoryError as error:
        return _refuse(f"memory: not enough for what was asked for: {error or 'no more to be had'}", USAGE)


def _refuse(error, code):
    from .messages import one_line

    if launched_rank() == 0:
        print(f"kda-engine: error: {one_line(error)}", file=sys.stderr)
    return code


def _check_working_folder():
    from kda_engine.errors import InputError

    try:
        os.getcwd()
    except OSError as error:
        raise InputError(f"working folder: expected one that exists, got: {error.strerror}") from None


if __name__ == "__main__":
    sys.exit(main())
