"""The least a device must move: every input read once, every output written once."""


def forward_bytes(inputs):
    """Bytes of one forward. inputs: name -> array as `kda_engine.forward` takes them; out is like v, final like initial."""
    written = inputs["v"].nbytes + inputs["initial_state"].nbytes
    return sum(x.nbytes for x in inputs.values()) + written
