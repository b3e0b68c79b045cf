"""Other implementations, where they are installed: each takes our inputs and returns a call to be timed, or None where
it has not the gate.

They get what they want in the form they want it, prepared outside the timed call.
"""

import cupy


def available():
    """name -> adapter of every peer that is installed here."""
    found = {}
    for name, (adapter, probe) in PEERS.items():
        try:
            probe()
        except ImportError:
            continue
        found[name] = adapter
    return found


def fla(inputs, cu_seqlens, options):
    """flash-linear-attention's `chunk_kda`: () -> (out [1,T,H,V], final state)."""
    import torch
    from fla.ops.kda import chunk_kda

    sixteen_bit = lambda x: torch.from_dlpack(x.view("i2")).view(torch.bfloat16)[None]
    q, k, v, g, beta = (sixteen_bit(inputs[name]) for name in ("q", "k", "v", "g", "beta"))
    A_log, dt_bias, state = (torch.from_dlpack(inputs[name]) for name in ("A_log", "dt_bias", "initial_state"))
    bounds = torch.from_numpy(cu_seqlens).cuda()
    gate = {"use_gate_in_kernel": options.gate != "log"}
    if options.gate != "log":
        gate |= {"A_log": A_log, "dt_bias": dt_bias.flatten()}
    if options.gate == "lower_bound":
        gate |= {"safe_gate": True, "lower_bound": options.lower_bound}

    def call():
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            return chunk_kda(
                q, k, v, g, beta, scale=options.scale_for(q.shape[-1]), initial_state=state, output_final_state=True,
                use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True, cu_seqlens=bounds, **gate)

    return call


def cudnn(inputs, cu_seqlens, options):
    """nvidia-cudnn-frontend's raw CUDA kernel for Hopper, launched directly: () -> (out, final state [N,H,V,K]).

    It reads g and beta in float32 and keeps states in [V,K] order.
    """
    from cudnn.linear_attention.hopper import cuda_host

    if options.gate == "softplus":
        return None
    flags = cuda_host.FLAG_L2NORM | cuda_host.FLAG_BETA_SIGMOID
    if options.gate == "lower_bound":
        flags |= cuda_host.FLAG_SAFE_GATE
    q, k, v = (inputs[name] for name in ("q", "k", "v"))
    g, beta = inputs["g"].astype("f4"), inputs["beta"].astype("f4")
    bounds = cupy.asarray(cu_seqlens.astype("i4"))
    state = cupy.ascontiguousarray(inputs["initial_state"].swapaxes(2, 3))
    out, final_state = cupy.empty_like(v), cupy.empty_like(state)
    address = lambda x: x.data.ptr

    def call():
        cuda_host.launch(
            device=cupy.cuda.Device().id, stream=cupy.cuda.get_current_stream().ptr, q=address(q), k=address(k),
            v=address(v), g=address(g), beta=address(beta), cu_seqlens=address(bounds), initial_state=address(state),
            o=address(out), final_state=address(final_state), total_tokens=len(q), n_seqs=len(cu_seqlens) - 1,
            n_heads=q.shape[1], a_log=address(inputs["A_log"]), dt_bias=address(inputs["dt_bias"]),
            gate_lower_bound=options.lower_bound, flags=flags, q_scale=options.scale_for(q.shape[-1]))
        return out, final_state

    return call


def _probe_fla():
    import fla.ops.kda  # noqa: F401


def _probe_cudnn():
    import cudnn.linear_attention.hopper.cuda_host  # noqa: F401


PEERS = {"fla": (fla, _probe_fla), "cudnn": (cudnn, _probe_cudnn)}
