"""The state alone from rank to rank, in parts that follow each other; every rank applies its own transition.

A part is some heads. While a rank applies its transition to one part, the next part is on its way: the time is that of
one whole state and, for each rank more, of one part. Transitions do not travel.
"""

import numpy as np

from .scanned import Scanned

# Parts of a state, where it has as many heads: more parts fill the chain sooner, but each message has its own latency.
PARTS = 8


class ChainRoute(Scanned):
    name = "chain"

    def travel(self, trip):
        chain, position, pair, link = trip.chain, trip.position, trip.pair, trip.link
        heads, parts = len(chain.heads), _parts(len(chain.heads))
        state, arriving, sending = None, [], []
        if position > 0:
            state = link.states("from the left", heads)
            arriving = [link.transport.start_receive(state[part], chain.ranks[position - 1]) for part in parts]
        feeds = position < chain.feeding
        leaving = link.states("to the right", heads) if feeds else None
        for number, part in enumerate(parts):
            if feeds and pair.M is None:
                # Known already: it waits for nobody.
                leaving[part] = pair.S[part]
            elif position > 0:
                yield arriving[number]
                if feeds:
                    leaving[part] = pair.M[part] @ state[part] + pair.S[part]
            if feeds:
                sending += link.transport.start_send(leaving[part], chain.ranks[position + 1])
        yield [request for requests in arriving for request in requests] + sending
        return state

    def scan_sent(self, chain, K, V, direction):
        sends = np.ones(len(chain.ranks), np.int64)
        sends[-1] = 0
        return sends * len(chain.heads) * K * V

    def scan_held(self, chain, K, V):
        return len(chain.heads) * K * V

    def scan_seconds(self, chain, crossings, rates):
        """The first part through all ranks, then the other parts at the distance of one."""
        K, V, parts = crossings.K, crossings.V, _parts(len(chain.heads))
        heads = -(-len(chain.heads) // len(parts))
        part = rates.latency + heads * K * V * (crossings.width / rates.bandwidth + 2 * K / rates.products)
        return (chain.feeding + len(parts) - 1) * part


def _parts(heads):
    """Heads in parts of near equal size, slices."""
    count = min(PARTS, heads)
    bounds = [heads * i // count for i in range(count + 1)] if count else [0]
    return [slice(a, b) for a, b in zip(bounds, bounds[1:])]
