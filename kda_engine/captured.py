"""Tensors captured elsewhere, in npz or safetensors files: named as in the input files, options as text beside them."""

import zipfile

import numpy as np

from .arrays import BFLOAT16
from .cases import Convolution
from .errors import InputError
from .options import Options

PER_TOKEN = ("q", "k", "v", "g", "beta", "d_out")
OTHERS = ("A_log", "dt_bias", "cu_seqlens", "initial_state", "d_final_state")
CONV = {f"conv/{x}_{part}": (x, part) for x in "qkv" for part in ("weight", "bias")}
REQUIRED = ("q", "k", "v", "g", "beta")
OPTIONS = ("gate", "lower_bound", "beta", "qk_l2norm", "scale", "state_layout")
# Option entries in an npz share their names with tensors ("beta"), so they carry this prefix there; either may.
PREFIX = "option."


def read_captured(path, given=None):
    """The arguments of `hdf5.inputs.write_input` from a capture, a dict; `given`: options that override the file's.

    Tensors: q, k, v, g, beta (required), d_out, A_log, dt_bias, cu_seqlens, initial_state, d_final_state,
    conv/{q,k,v}_{weight,bias}; per-token ones packed [T,...] or batched [B,T,...]. Options: safetensors metadata or npz
    entries of text, each under its name or "option.NAME" (in an npz always for beta); also "activation".
    bfloat16 in an npz: 2-byte void, as NumPy stores it. Raises InputError naming file, tensor and expectation.
    """
    tensors, texts = _read(path)
    activation = texts.pop("activation", "silu")
    if activation not in ("silu", "none"):
        raise InputError(f"{path}: activation: expected silu or none, got {activation!r}")
    for name in texts:
        if name not in OPTIONS:
            raise InputError(f"{path}: {name}: expected an option named {', '.join(OPTIONS)} or activation")
    known = (*PER_TOKEN, *OTHERS, *CONV)
    for name in tensors:
        if name not in known:
            raise InputError(f"{path}: {name}: expected tensors named {', '.join(known)}")
    for name in REQUIRED:
        if name not in tensors:
            found = ", ".join(sorted(tensors)) or "none"
            raise InputError(f"{path}: {name}: expected a tensor of that name, got {found}")
    try:
        options = Options(**({name: _value(name, text) for name, text in texts.items()} | (given or {})))
    except InputError as error:
        raise InputError(f"{path}: option {error}") from None
    conv = {name: tensors.pop(name) for name in CONV if name in tensors}
    return _packed(path, tensors) | {"options": options, "conv": _convolution(conv, activation)}


def _read(path):
    """(tensors by name, option texts by name)"""
    try:
        if str(path).endswith(".npz"):
            return _read_npz(path)
        if str(path).endswith(".safetensors"):
            return _read_safetensors(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None
    raise InputError(f"{path}: expected a file named .npz or .safetensors")


def _read_npz(path):
    tensors, texts = {}, {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for name in file.files:
                x = file[name]
                if x.ndim == 0 or x.dtype.kind in "US":
                    texts[name.removeprefix(PREFIX)] = str(x.item())
                else:
                    tensors[name] = x.view(BFLOAT16) if x.dtype == "V2" else x
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: expected an npz file of plain arrays: {error}") from None
    return tensors, texts


def _read_safetensors(path):
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise InputError(f"{path}: expected a safetensors file: {error}") from None
    # "format" is what other libraries write there about themselves.
    return tensors, {name.removeprefix(PREFIX): text for name, text in metadata.items() if name != "format"}


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
