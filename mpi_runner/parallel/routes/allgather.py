"""All boundary pairs to all ranks; then each scans for itself, and all work in parallel."""

import numpy as np

from kda_engine import scan
from kda_engine.affine import Affine

from ..boundary import FORWARD
from ..volume import gathered
from .scanned import Scanned


class Allgather(Scanned):
    """Forward S travels, and M of the heads whose transition matters; backward D alone, for M is the forward's."""

    name = "allgather"

    def start(self, crossings, rank, pair, transport, dtype):
        lengths = self._lengths(crossings)
        if not any(lengths):
            return None
        way = crossings.direction.name
        mine = transport.buffer(f"packed {way}", (lengths[rank],), dtype)
        chain = self._fed(crossings, rank)
        if lengths[rank]:
            S = pair.S[chain.heads]
            mine[: S.size] = S.reshape(-1)
            if len(mine) > S.size:
                kept = chain.kept[chain.ranks.index(rank)]
                mine[S.size :] = pair.M[chain.heads[kept]].reshape(-1)
        return transport.start_gather(mine, lengths, f"gathering the boundary matrices, {way}")

    def travel(self, trip):
        chain, position, link = trip.chain, trip.position, trip.link
        yield trip.common.requests
        contributions = trip.common.contributions
        heads, S = len(chain.heads), len(chain.heads) * link.K * link.V

        def transition(p):
            """Of a position, zero for heads that sent none; None if no head did."""
            if not chain.kept[p].any():
                return None
            M = np.zeros((heads, link.K, link.K), link.dtype)
            M[chain.kept[p]] = contributions[chain.ranks[p]][S:].reshape(-1, link.K, link.K)
            return M

        if trip.found is not None:
            # The backward scans over the ranks behind; the last of them never sent anything.
            trip.found[chain.sequence] = {p: transition(p) for p in range(position + 1, chain.feeding)}
        if position == 0:
            return None
        pairs = []
        for p in range(position):
            M = transition(p) if trip.direction is FORWARD else self._turned(trip, p)
            pairs.append(Affine(M, contributions[chain.ranks[p]][:S].reshape(heads, link.K, link.V)))
        return scan.prefix(pairs, np.zeros((heads, link.K, link.V), link.dtype))[-1]

    def _turned(self, trip, position):
        # Position p of the way back is position (last - p) of the way forward.
        M = trip.before.get(trip.chain.feeding - position)
        return None if M is None else trip.direction.of_travel(M)

    def _fed(self, crossings, rank):
        """The scanned heads of the `Chain` that a rank feeds, or None."""
        return next((chain.scanned for chain in crossings.chains if rank in chain.ranks[:-1]), None)

    def _lengths(self, crossings):
        """Values that each rank gives to the gather, a list."""
        S, M = crossings.K * crossings.V, crossings.K**2
        lengths = [0] * crossings.ranks
        for chain in crossings.chains:
            scanned = chain.scanned
            moves = scanned.kept.sum(axis=1) if crossings.direction is FORWARD else [0] * len(chain.ranks)
            for rank, heads in zip(chain.ranks[:-1], moves):
                lengths[rank] = len(scanned.heads) * S + int(heads) * M
        return lengths

    def sent(self, crossings):
        sent = [gathered(length * crossings.width, crossings.ranks) for length in self._lengths(crossings)]
        return np.add(sent, self.handed_on(crossings)).tolist()

    def held(self, crossings):
        return [sum(self._lengths(crossings)) * crossings.width] * crossings.ranks

    def exchange_seconds(self, crossings, rates):
        sent = self.sent(crossings)
        if not any(sent):
            return 0.0
        scanned = any(self._lengths(crossings))
        rounds = (crossings.ranks - 1).bit_length() if scanned else 1
        longest = max(len(chain.ranks) - 2 for chain in crossings.chains)
        products = longest * crossings.HV * 2 * crossings.K**2 * crossings.V if scanned else 0
        return rounds * rates.latency + max(sent) / rates.bandwidth + products / rates.products
