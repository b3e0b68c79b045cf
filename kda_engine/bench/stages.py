"""The four stages of an engine one by one: what a distributed run spends its time on."""

from .. import layout
from ..compare import compare
from ..engines import make_engine
from .problem import BOTH, FORWARD, passed, start_row
from .record import CONTROL, OURS


def measure_stages(problem, samples, cold):
    """A record's row for every stage; without samples where the stage's result fails its check."""
    calls, errors = _stages(problem)
    rows = {name: start_row(problem, f"stage {name}", cold, False, errors[name]) for name in calls}
    ready = {name: call for name, call in calls.items() if passed(rows[name])}
    taken = problem.machine.measure({**ready, CONTROL: problem.machine.control()}, samples, cold)
    for name in ready:
        rows[name]["samples"] = {OURS: taken[name], CONTROL: taken[CONTROL]}
    return list(rows.values())


def _stages(problem):
    """(call, error) of every stage by name, two dicts.

    forward and backward are what the public calls run; the summaries must lead to the same states.
    """
    x, options = problem.inputs, problem.options
    operands, _ = layout.pack(x["q"], x["k"], x["v"], x["g"], x["beta"], x["A_log"], x["dt_bias"],
                              problem.shape.cu_seqlens, options.gate)
    engine, state = make_engine(problem.machine.engine), x["initial_state"]
    zeros = 0 * state
    d_out, d_state = problem.gradients["d_out"], problem.gradients["d_final_state"]
    fwd = engine.forward(operands, options, state, save=True)
    pair = engine.summarise(operands, options, zeros, transition=True)
    backward = lambda: engine.backward(fwd.saved, d_out, d_state)
    d_initial_state = engine.summarise_backward(operands, options, d_out, d_state)
    calls = {
        "summarise": lambda: engine.summarise(operands, options, zeros, transition=True),
        "forward": lambda: engine.forward(operands, options, state, save=False),
        "summarise_backward": lambda: engine.summarise_backward(operands, options, d_out, d_state),
        "backward": backward,
    }
    # max() would pass over a NaN; a sum does not.
    of_forward, of_backward = problem.error(FORWARD), problem.error(BOTH)
    errors = {
        "summarise": of_forward + compare(pair.apply(state), fwd.final_state),
        "forward": of_forward,
        "summarise_backward": of_backward + compare(d_initial_state, backward().d_initial_state),
        "backward": of_backward,
    }
    return calls, errors
