"""What every route offers: its walk through one direction, and its cost in closed form."""


class Route:
    """name: as `--scan` has it. summarises: whether ranks condense their shares first, so that decays are looked at."""

    name = ""
    summarises = True

    def walk(self, side, crossings, skips, transport, transitions):
        """Run all of a `Side`'s groups in the order that this route allows. Collective.

        transitions: what the walk forward returned for the walk back, None forward. Returns that, None where no
        backward follows.
        """
        raise NotImplementedError

    def covers(self, crossings):
        """Whether this route can carry these crossings."""
        return True

    def sent(self, crossings):
        """Bytes that each rank sends in one direction, a list."""
        raise NotImplementedError

    def held(self, crossings):
        """Bytes of other ranks' boundary matrices that each rank holds at once in one direction, a list."""
        raise NotImplementedError

    def seconds(self, crossings, rates, rate):
        """Time of one direction on the slowest rank. rates: `prediction.Rates`; rate: tokens times value heads a second
        of the work itself. Exchanges are taken not to overlap with work."""
        exchange = self.exchange_seconds(crossings, rates)
        HV, direction = crossings.HV, crossings.direction
        work = max((s.stop - s.start) * HV / rate for s in crossings.segments)
        summary = max(tokens(direction.feeds(s)) for s in crossings.segments) * HV / rates.summary
        return summary + exchange + work

    def exchange_seconds(self, crossings, rates):
        """Time from the last summary to the last state that a rank waits for."""
        raise NotImplementedError


def tokens(piece):
    """Tokens of a piece, none without one."""
    return 0 if piece is None else piece.stop - piece.start
