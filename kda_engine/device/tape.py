"""Launches of a call that is made again and again with other arrays: written down once, then made as they stand."""

import cupy

from .launch import taped

# Addresses that stand for arrays to come; no device has memory there.
_FIRST, _DISTANCE = 1 << 56, 1 << 48


class Tape:
    """The launches of `call`, made whenever this object is called with the addresses of all arrays.

    like: an array for each that is to come, None where there is none: its shape and type are what `call` gets in arrays
    that stand for them, in the same order. result: what `call` returned. Not for two threads at once.
    """

    def __init__(self, call, like):
        places = {_FIRST + i * _DISTANCE: i for i in range(len(like))}
        with taped() as steps:
            self.result = call(*[None if x is None else _at(address, x) for address, x in zip(places, like)])
        self._steps = [(start, list(addresses), [(i, places[x]) for i, x in enumerate(addresses) if x in places])
                       for start, addresses in steps]

    def __call__(self, addresses):
        for start, given, places in self._steps:
            for i, place in places:
                given[i] = addresses[place]
            start(*given)


def _at(address, x):
    memory = cupy.cuda.UnownedMemory(address, x.nbytes, None, x.data.device_id)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0))
