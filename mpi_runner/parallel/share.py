"""One rank's share of a job in memory, split into the groups that wait for different things."""

from dataclasses import dataclass

from kda_engine.layout import Operands


@dataclass(frozen=True)
class Group:
    """Consecutive pieces of a rank that can be computed together.

    operands: their tokens, one sequence a piece. first, last: their places among the rank's pieces.
    start, stop: their tokens within the share.
    """

    operands: Operands
    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True)
class Share:
    """A rank's operands (one sequence a piece), cut into up to three groups.

    left: the piece that continues from an earlier rank. right: the piece that goes on to a later rank, unless that is
    `left` itself. inner: all between; they wait for nobody. Each may be None.
    """

    operands: Operands
    left: Group | None
    inner: Group | None
    right: Group | None

    @classmethod
    def of(cls, segment, operands):
        """operands: the segment's tokens, packed from 0; their cu_seqlens is replaced by the pieces'."""
        bounds = segment.cu_seqlens
        count = len(segment.pieces)
        first = 1 if segment.left is not None else 0
        last = count - 1 if segment.right is not None and segment.right is not segment.left else count

        def group(a, b):
            if a >= b:
                return None
            local = bounds[a : b + 1] - bounds[a]
            start, stop = int(bounds[a]), int(bounds[b])
            return Group(operands.slice_tokens(start, stop, local), a, b, start, stop)

        whole = operands.slice_tokens(0, operands.tokens, bounds)
        return cls(whole, group(0, first), group(first, last), group(last, count))

    @property
    def named_groups(self):
        """(name, Group) of the groups that are there, in token order."""
        named = (("left", self.left), ("inner", self.inner), ("right", self.right))
        return [(name, group) for name, group in named if group is not None]
