"""`completion`: what makes a shell complete commands, options and their values."""

from ..exit_codes import PASS

SHELLS = ("bash", "zsh")


def add(subparsers):
    parser = subparsers.add_parser(
        "completion", help="print a shell's completion script",
        description="bash: eval \"$(kda-engine completion bash)\" in ~/.bashrc. zsh: kda-engine completion zsh > "
                    "DIR/_kda-engine, with DIR in $fpath before compinit.")
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=main)


def main(args):
    """Print the script."""
    import shtab

    from ..__main__ import parser

    print(shtab.complete(parser(), args.shell))
    return PASS
