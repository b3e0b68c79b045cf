"""How an HDF5 object stores its values, read from its header's bytes without the HDF5 library.

The library may crash on opening a virtual dataset whose mapping is damaged: it keeps mappings in a heap without
checksums. So this is asked first. Source: HDF5 File Format Specification 3.0, IV.A.1 (object headers), IV.A.2.i (data
layout) and IV.A.2.h (external data files).
"""

import os

_LAYOUT, _CONTINUATION = 0x08, 0x10
_VIRTUAL = 3
# No header has as many blocks or as large ones; a damaged one may lead in a circle.
_MOST_BLOCKS, _MOST_BYTES = 1000, 1 << 24


def is_virtual(file, address):
    """Whether the object at `address` of an open h5py.File is a virtual dataset; None where the bytes do not tell."""
    plist = file.id.get_create_plist()
    if plist.get_sizes() != (8, 8):
        return None
    descriptor, base = file.id.get_vfd_handle(), plist.get_userblock()
    read = lambda at, size: _read(descriptor, base + at, size)
    try:
        # Version 3 is the first whose layout can be virtual; there the class follows the version.
        layout = next((data for kind, data in _messages(read, address) if kind == _LAYOUT), None)
        return layout is not None and layout[0] >= 3 and layout[1] == _VIRTUAL
    except (ValueError, IndexError, OverflowError, OSError):
        return None


def _messages(read, address):
    """(type, bytes) of every message of the header, block by block."""
    head = read(address, 16)
    if head[:5] == b"OHDR\x02":
        flags = head[5]
        width, at = 1 << (flags & 3), address + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        blocks = [(at + width, _number(read(at, width)))]
        type_bytes, head_bytes, frame = 1, 6 if flags & 4 else 4, 4
    elif head[0] == 1:
        blocks = [(address + 16, _number(head[8:12]))]
        type_bytes, head_bytes, frame = 2, 8, 0
    else:
        raise ValueError("no object header")
    for number, (at, size) in enumerate(blocks):
        if number == _MOST_BLOCKS:
            raise ValueError("a header without end")
        block, place = read(at, size), 0
        while place + head_bytes <= size:
            kind = _number(block[place : place + type_bytes])
            length = _number(block[place + type_bytes : place + type_bytes + 2])
            data = _exactly(block[place + head_bytes : place + head_bytes + length], length)
            place += head_bytes + length
            if kind == _CONTINUATION:
                # A signature before and a checksum behind, where the version has them.
                blocks.append((_number(data[:8]) + frame, _number(data[8:16]) - 2 * frame))
            yield kind, data


def _number(data):
    return int.from_bytes(data, "little")


def _read(descriptor, at, size):
    if size > _MOST_BYTES:
        raise ValueError("a block too large")
    return _exactly(os.pread(descriptor, size, at), size)


def _exactly(data, size):
    if len(data) != size:
        raise ValueError("cut short")
    return data
