"""Decoding: sequences of a few tokens through the token recurrence, the state read and written once."""

from ...device.launch import launch

# Up to here reading the state dominates, and chunks of mostly padding would cost more than single tokens.
LONGEST = 8


def covers(problem):
    """Whether every sequence is short enough."""
    # The average first, which takes no look at every sequence.
    return len(problem.v) <= LONGEST * problem.sequences and problem.plan.longest <= LONGEST


def forward(problem, initial_state, out, final_state):
    """Writes out [T,HV,V] of the element type and the final state [N,HV,K,V] float32. initial_state: None for zeros."""
    if initial_state is None:
        initial_state = problem.zero_states()
    q, k, v, g, beta, A_log, dt_bias = problem.addresses
    launch("step", problem.variant, problem.device, count=problem.sequences, q=q, k=k, v=v, g=g, beta=beta, A_log=A_log,
           dt_bias=dt_bias, initial=initial_state, cu_seqlens=problem.plan.cu_seqlens, key_heads=problem.heads,
           out=out, final=final_state, **problem.sizes, **problem.activation.arguments)
