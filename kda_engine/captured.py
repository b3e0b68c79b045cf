"""Tensors captured elsewhere, in npz or safetensors files: named as in the input files, options as text beside them."""

import numpy as np

from .capture_files import open_capture
from .cases import Convolution
from .errors import InputError
from .options import Options

PER_TOKEN = ("q", "k", "v", "g", "beta", "d_out")
OTHERS = ("A_log", "dt_bias", "cu_seqlens", "initial_state", "d_final_state")
CONV = {f"conv/{x}_{part}": (x, part) for x in "qkv" for part in ("weight", "bias")}
REQUIRED = ("q", "k", "v", "g", "beta")
# Bytes of cu_seqlens, as in `hdf5.types.MOST_AT_OPENING`.
MOST_BOUNDS = 256 << 20
OPTIONS = ("gate", "lower_bound", "beta", "qk_l2norm", "scale", "state_layout")


def read_captured(path, given=None, check=lambda **arguments: None):
    """The arguments of `hdf5.inputs.write_input` from a capture, a dict; `given`: options that override the file's.

    Tensors: q, k, v, g, beta (required), d_out, A_log, dt_bias, cu_seqlens, initial_state, d_final_state,
    conv/{q,k,v}_{weight,bias}; per-token ones packed [T,...] or batched [B,T,...]. Options: safetensors metadata or npz
    entries of text, each under its name or "option.NAME" (in an npz always for beta); also "activation".
    bfloat16 in an npz: 2-byte void, as NumPy stores it. check: called with the same arguments before any tensor but
    cu_seqlens is read, arrays without memory in the others' place; it may raise InputError.
    Raises InputError naming file, tensor and expectation.
    """
    with open_capture(path) as capture:
        known = (*PER_TOKEN, *OTHERS, *CONV)
        for name in capture.declared:
            if name not in known:
                raise InputError(f"{path}: {name}: expected tensors named {', '.join(known)}")
        for name in REQUIRED:
            if name not in capture.declared:
                found = ", ".join(sorted(capture.declared)) or "none"
                raise InputError(f"{path}: {name}: expected a tensor of that name, got {found}")
        options, activation = _options(path, dict(capture.texts), given or {})
        arguments = lambda tensors: _arguments(path, tensors, options, activation)
        tensors = {name: declared.stand_in() for name, declared in capture.declared.items()}
        if "cu_seqlens" in tensors:
            if tensors["cu_seqlens"].nbytes > MOST_BOUNDS:
                raise InputError(f"{path}: cu_seqlens: expected at most {MOST_BOUNDS} bytes, got "
                                 f"{tensors['cu_seqlens'].nbytes}")
            tensors["cu_seqlens"] = capture.read("cu_seqlens")
        check(**arguments(dict(tensors)))
        for name in tensors:
            if name != "cu_seqlens":
                tensors[name] = capture.read(name)
        return arguments(tensors)


def _options(path, texts, given):
    """(Options, activation) from the capture's texts and what is given beside it."""
    activation = texts.pop("activation", "silu")
    if activation not in ("silu", "none"):
        raise InputError(f"{path}: activation: expected silu or none, got {activation!r}")
    for name in texts:
        if name not in OPTIONS:
            raise InputError(f"{path}: {name}: expected an option named {', '.join(OPTIONS)} or activation")
    try:
        return Options(**({name: _value(name, text) for name, text in texts.items()} | given)), activation
    except InputError as error:
        raise InputError(f"{path}: option {error}") from None


def _arguments(path, tensors, options, activation):
    conv = {name: tensors.pop(name) for name in CONV if name in tensors}
    return _packed(path, tensors) | {"options": options, "conv": _convolution(conv, activation)}


def _value(name, text):
    if name in ("gate", "beta", "state_layout"):
        return text
    if name == "qk_l2norm":
        return {"true": True, "1": True, "false": False, "0": False}.get(text.lower(), text)
    try:
        return float(text)
    except ValueError:
        return text


def _packed(path, tensors):
    """Batched tensors [B,T,...] as packed ones with cu_seqlens."""
    if tensors["k"].ndim != 4:
        return tensors
    batch, T = tensors["k"].shape[:2]
    for name in PER_TOKEN:
        if name not in tensors:
            continue
        if tensors[name].shape[:2] != (batch, T):
            raise InputError(f"{path}: {name}: expected a batch [{batch}, {T}, ...] as k is, got {tensors[name].shape}")
        tensors[name] = tensors[name].reshape((batch * T,) + tensors[name].shape[2:])
    if batch > 1:
        if "cu_seqlens" in tensors:
            raise InputError(f"{path}: cu_seqlens: expected none beside a batch of {batch}")
        tensors["cu_seqlens"] = np.arange(batch + 1, dtype=np.int64) * T
    return tensors


def _convolution(tensors, activation):
    if not tensors:
        return None
    part = lambda kind: {CONV[name][0]: x for name, x in tensors.items() if CONV[name][1] == kind}
    return Convolution(None if activation == "none" else activation, part("weight"), part("bias"))
