"""The command line: `kda-engine COMMAND` and `python -m mpi_runner COMMAND`."""

import argparse
import contextlib
import importlib
import os
import sys
import traceback

from kda_engine.errors import InputError
from kda_engine.version import VERSION

from .exit_codes import GOLDEN, INTERNAL, USAGE
from .hints import hint
from .launched import launched_rank

COMMANDS = ("run", "input", "golden", "compare", "bench", "plan", "info", "completion")


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        if launched_rank() == 0:
            self.print_usage(sys.stderr)
            print(f"{self.prog}: error: {message}\n{hint(message, self)}", file=sys.stderr)
        raise SystemExit(USAGE)


def parser():
    """The parser of all commands."""
    top = _Parser(prog="kda-engine", description="Kimi Delta Attention: distributed runs, goldens, benchmarks.")
    top.add_argument("--version", action="version", version=f"kda-engine {VERSION}")
    subparsers = top.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name in COMMANDS:
        importlib.import_module(f".commands.{name}", __package__).add(subparsers)
    return top


def main(argv=None):
    """Run one command; returns its exit code (see exit_codes). Only the first rank prints."""
    from kda_engine.hdf5.golden import GoldenError

    if hasattr(sys.stdout, "reconfigure"):
        # File names may hold bytes that are no text.
        sys.stdout.reconfigure(errors="backslashreplace")
    args = parser().parse_args(argv)
    try:
        with contextlib.ExitStack() as stack:
            if launched_rank() != 0:
                stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open(os.devnull, "w"))))
            code = args.run(args)
            sys.stdout.flush()
            return code
    except (GoldenError, InputError) as error:
        if launched_rank() == 0:
            print(f"kda-engine: error: {error}", file=sys.stderr)
        return GOLDEN if isinstance(error, GoldenError) else USAGE
    except BrokenPipeError:
        # Whoever read the output has seen enough; Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERNAL
    except Exception:
        # Python's own exit code would be 1, which says that a comparison failed.
        traceback.print_exc()
        return INTERNAL


if __name__ == "__main__":
    sys.exit(main())
