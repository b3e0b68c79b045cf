"""Time of a run in closed form, from rates that somebody states. Exchanges are taken not to overlap with work."""

from .parallel.rates import Rates

__all__ = ["Rates", "predict"]


def predict(route, crossings, rates):
    """Seconds that the slowest rank takes, files left out. crossings: by `traffic.crossings`, one a direction."""
    return sum(route.seconds(one, rates, getattr(rates, one.direction.name)) for one in crossings)
