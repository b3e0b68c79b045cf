"""What a compiled kernel says about itself: the parameters in the ELF notes of a cubin. Needs no GPU."""

import struct

# Kinds of entries in a .nv.info section, and the one that describes a kernel parameter.
_SIZED_VALUE = 4
_PARAMETER_INFO = 0x17


def parameter_sizes(cubin, kernel):
    """Bytes of each parameter of the kernel, in order. Raises KeyError when the cubin holds no such kernel."""
    info = _sections(cubin)[f".nv.info.{kernel}"]
    parameters = {}
    at = 0
    while at < len(info):
        kind, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if kind == _SIZED_VALUE:
            if attribute == _PARAMETER_INFO:
                _, ordinal, _, packed = struct.unpack_from("<IHHI", info, at)
                parameters[ordinal] = packed >> 18
            at += size
    return [parameters[ordinal] for ordinal in range(len(parameters))]


def static_shared_bytes(cubin, kernel):
    """Bytes of shared memory that the kernel declares itself."""
    return len(_sections(cubin).get(f".nv.shared.{kernel}", b""))


def _sections(cubin):
    """Contents by name; of a section without bits in the file, as many zeros as it is long."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    count, names = struct.unpack_from("<HH", cubin, 0x3C)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + 64 * i) for i in range(count)]
    strings = headers[names][4]
    no_bits = 8
    found = {}
    for name, kind, _, _, offset, size, *_ in headers:
        text = cubin[strings + name : cubin.index(b"\0", strings + name)].decode()
        found[text] = bytes(size) if kind == no_bits else cubin[offset : offset + size]
    return found
