"""The operator's options as options of a command line."""

from kda_engine.options import BETAS, GATES, STATE_LAYOUTS


def add(group):
    """Add them to an argparse group whose parser leaves absent options out; `Options` checks what is said."""
    one_of = lambda names: f"{', '.join(names[:-1])} or {names[-1]}"
    group.add_argument("--gate", metavar="FORM", help=f"what g means: {one_of(GATES)} (lower_bound)")
    group.add_argument("--lower-bound", type=float, metavar="X",
                       help="of the gate of that name: nats a token, in [-5, 0) (-5)")
    group.add_argument("--beta", metavar="FORM", help=f"what beta means: {one_of(BETAS)} (logit)")
    group.add_argument("--qk-l2norm", type=int, metavar="0|1", help="1: q and k are divided by their norm (1)")
    group.add_argument("--scale", type=float, metavar="X", help="factor on q (1/sqrt(K))")
    group.add_argument("--state-layout", metavar="ORDER", help=f"order of a state's axes: {one_of(STATE_LAYOUTS)} (KV)")
