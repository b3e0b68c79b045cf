"""Time of a run in closed form, from rates that somebody states. Exchanges are taken not to overlap with work."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """What one rank does in a second.

    forward, backward, summary: tokens times value heads. bandwidth: bytes sent to other ranks. latency: seconds that
    each message takes beside its bytes.
    """

    forward: float
    backward: float
    summary: float
    bandwidth: float
    latency: float


def predict(route, crossings, rates):
    """Seconds that the slowest rank takes, files left out. crossings: by `traffic.crossings`, one a direction."""
    return sum(route.seconds(one, rates, getattr(rates, one.direction.name)) for one in crossings)
