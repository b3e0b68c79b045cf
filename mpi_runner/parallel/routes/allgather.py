"""Route B: all boundary pairs to all ranks; then each scans for itself, and all work in parallel."""

import numpy as np

from kda_engine import scan
from kda_engine.affine import Affine

from ..boundary import FORWARD
from ..volume import gathered
from .route import Route


class Allgather(Route):
    """Forward S travels, and M of the heads whose transition matters; backward D alone, for M is the forward's."""

    name = "allgather"

    def walk(self, side, crossings, skips, transport, transitions):
        rank, clock = side.segment.rank, side.clock
        with clock("summarise"):
            pair = side.summarise(skips)
        with clock("gather"):
            mine = transport.buffer(f"packed {side.direction.name}", (self._lengths(crossings)[rank],),
                                    side.states.dtype)
            self._pack(crossings, rank, pair, mine)
            gather = transport.start_gather(mine, self._lengths(crossings),
                                            f"gathering the boundary matrices, {side.direction.name}")
        side.run_early()
        with clock("gather"):
            contributions = gather.wait()
        if side.waiting_name is not None:
            with clock("scan"):
                pairs = [Affine(self._transition(crossings, r, contributions[r], transitions),
                                self._state(crossings, contributions[r])) for r in crossings.before(rank)]
                side.enter(scan.prefix(pairs, np.zeros(side.states.shape[1:], side.states.dtype))[-1])
            side.run_waiting()
        if side.direction is FORWARD and side.save:
            # The backward scans over the ranks behind; the last of them never sent anything.
            return {r: self._transition(crossings, r, contributions[r], None) for r in crossings.behind(rank)[:-1]}
        return None

    def _lengths(self, crossings):
        S, M = crossings.HV * crossings.K * crossings.V, crossings.K * crossings.K
        moves = crossings.kept.sum(axis=1) if crossings.direction is FORWARD else np.zeros(crossings.ranks, int)
        return [S * int(sends) + M * int(heads) for sends, heads in zip(crossings.sends, moves)]

    def _pack(self, crossings, rank, pair, into):
        if pair is None:
            return
        size = pair.S.size
        into[:size] = pair.S.ravel()
        if pair.M is not None:
            into[size:] = pair.M[crossings.kept[rank]].ravel()

    def _state(self, crossings, flat):
        HV, K, V = crossings.HV, crossings.K, crossings.V
        return flat[: HV * K * V].reshape(HV, K, V)

    def _transition(self, crossings, rank, flat, transitions):
        """A rank's transition as it acts in this direction, zero for heads that sent none; None if no head did."""
        kept = crossings.kept[rank]
        if not kept.any():
            return None
        if transitions is not None:
            return crossings.direction.of_travel(transitions[rank])
        HV, K, V = crossings.HV, crossings.K, crossings.V
        M = np.zeros((HV, K, K), flat.dtype)
        M[kept] = flat[HV * K * V :].reshape(-1, K, K)
        return M

    def sent(self, crossings):
        return [gathered(length * crossings.width, crossings.ranks) for length in self._lengths(crossings)]

    def held(self, crossings):
        return [sum(self._lengths(crossings)) * crossings.width] * crossings.ranks

    def rounds(self, crossings):
        return (crossings.ranks - 1).bit_length()
