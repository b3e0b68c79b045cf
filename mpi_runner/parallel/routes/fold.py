"""The state from rank to rank in the order of the tokens, through every piece of each rank: the `chain` whose bits do not
depend on the ranks (see `folding`). A rank hands its state on before it computes."""

from .serial import Serial


class Fold(Serial):
    name = "chain"

    def walk(self, side, crossings, skips, transport, transitions):
        rank, sending = side.segment.rank, []
        if side.feeding_name is not None:
            with side.clock("summarise"):
                steps = side.steps()

        def hand_on():
            with side.clock("scan"):
                state = side.known
                for step in steps:
                    state = step.apply(state)
            with side.clock("gather"):
                into = transport.buffer(f"folded {side.direction.name}", state.shape, state.dtype)
                into[...] = state
                sending.extend(transport.start_send(into, crossings.behind(rank)[0]))

        waits = side.waiting_name is not None
        if side.feeding_name is not None and side.feeding_name != side.waiting_name:
            hand_on()
        side.run_early()
        if waits:
            with side.clock("gather"):
                state = transport.buffer(f"entering {side.direction.name}", side.states.shape[1:], side.states.dtype)
                transport.wait(transport.start_receive(state, crossings.before(rank)[-1]),
                               "the neighbour's boundary state")
            side.enter(state)
            if side.feeding_name == side.waiting_name:
                hand_on()
            side.run_waiting()
        with side.clock("gather"):
            transport.wait(sending, "handing on the boundary state")
