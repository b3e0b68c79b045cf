"""What ranks and the wires between them do in a second, for times in closed form."""

import math
from dataclasses import dataclass

# Seconds between two messages that one rank sends, where a message's latency is not shorter.
GAP = 2e-6


@dataclass(frozen=True)
class Rates:
    """What one rank does in a second.

    forward, backward, summary: tokens times value heads. bandwidth: bytes sent to other ranks. latency: seconds that
    each message takes beside its bytes. products: floating-point operations in products of boundary matrices.
    """

    forward: float
    backward: float
    summary: float
    bandwidth: float
    latency: float
    products: float = math.inf

    @property
    def gap(self):
        """Seconds between two messages of one rank that do not wait for each other."""
        return min(self.latency, GAP)


# To choose between scans where nobody stated rates: a network of today, products on a few cores of a host.
TYPICAL = Rates(forward=1e6, backward=1e6, summary=1e6, bandwidth=1e10, latency=1e-5, products=5e10)
