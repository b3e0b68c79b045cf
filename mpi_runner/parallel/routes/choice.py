"""Which scan `auto` takes: the least time of the exchange in closed form, among those whose memory is bounded."""

from . import ROUTES

# Most bytes of other ranks' boundary matrices that a rank may hold at once.
MOST_HELD = 1 << 30


def choose(crossings, rates):
    """(route, why it was taken) for the `Crossings` of one direction; the same on every rank.

    One message to each neighbour is taken wherever it is enough. `serial` is a yardstick and never taken.
    """
    neighbour = ROUTES["neighbour"]
    if neighbour.covers(crossings):
        return neighbour, "no transition matters, so one message to each neighbour is enough"
    several = crossings.nodes is not None and len(set(crossings.nodes)) > 1
    seconds = {}
    for name, route in ROUTES.items():
        if name in ("serial", "neighbour") or name == "levels" and not several:
            continue
        if max(route.held(crossings)) <= MOST_HELD:
            seconds[name] = route.exchange_seconds(crossings, rates)
    name = min(seconds or ["chain"], key=seconds.get)
    return ROUTES[name], f"least predicted time of the exchange, {seconds.get(name, 0):.2g} s"
