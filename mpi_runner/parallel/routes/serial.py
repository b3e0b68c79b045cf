"""Route A: every rank waits for its neighbour's state, computes, and hands on its own. Exact, no parallel gain."""

from .route import Route, tokens


class Serial(Route):
    name = "serial"
    summarises = False

    def walk(self, side, crossings, skips, transport, transitions):
        rank, control = side.segment.rank, transport.control
        sending = []

        def hand_on():
            with side.clock("gather"):
                sending.extend(transport.start_send(side.leaving, crossings.behind(rank)[0]))

        for name in side.early:
            side.run(name)
            if name == side.feeding_name:
                hand_on()
        if side.waiting_name is not None:
            with side.clock("gather"):
                state = transport.buffer(f"{self.name} {side.direction.name}", side.states.shape[1:], side.states.dtype)
                transport.wait(transport.start_receive(state, crossings.before(rank)[-1]),
                               "the neighbour's boundary state")
            side.enter(state)
            side.run_waiting()
            if side.feeding_name == side.waiting_name:
                hand_on()
        with side.clock("gather"):
            for request in sending:
                control.wait(request, "handing on the boundary state")

    def sent(self, crossings):
        return [crossings.state_bytes * bool(sends) for sends in crossings.sends]

    def held(self, crossings):
        waits = crossings.direction.waits
        return [crossings.state_bytes * (waits(segment) is not None) for segment in crossings.segments]

    def seconds(self, crossings, rates, rate):
        """Each rank does what waits for nobody, then receives a state, then does the piece that waited for it."""
        HV, direction = crossings.HV, crossings.direction
        handed_on, slowest = 0.0, 0.0
        for segment in crossings.segments[:: direction.sign]:
            waits, feeds = direction.waits(segment), direction.feeds(segment)
            waiting = tokens(waits) * HV / rate
            end = (segment.stop - segment.start) * HV / rate - waiting
            if waits is not None:
                end = max(end, handed_on + rates.latency + crossings.state_bytes / rates.bandwidth) + waiting
            # A piece that only feeds was done first, so that its state left before the rank began to wait.
            handed_on = end if feeds is waits else tokens(feeds) * HV / rate
            slowest = max(slowest, end)
        return slowest
