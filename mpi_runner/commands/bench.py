"""`bench`: how fast engines and collectives are on this machine, and whether that has changed."""

from ..benchmarks import collectives, comparison, engine, scaling


def add(subparsers):
    parser = subparsers.add_parser(
        "bench", help="measure the times of an engine on this machine",
        description="Without a mode: measures an engine's forward (and backward). Each result is checked against the "
                    "float64 recurrence before it is timed. Prints a Markdown page. Exit code 1 when a check fails.")
    engine.add_options(parser)
    modes = parser.add_subparsers(title="modes", metavar="MODE")
    collectives.add(modes)
    scaling.add(modes)
    comparison.add(modes)
