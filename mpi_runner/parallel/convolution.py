"""The short convolution of a rank's share: its halo in from the left, the halo's gradient back to earlier ranks.

A sequence that was cut needs its previous W-1 tokens, which may lie on several earlier ranks. Forward every rank has
them beside its share; backward the halo's gradient goes to whoever owns those tokens and is added there.
"""

import numpy as np

from kda_engine.api import short_conv, short_conv_backward
from kda_engine.arrays import array_module, to_host

CHANNELS = ("q", "k", "v")


class ShareConvolution:
    """The convolutions before q, k and v of one rank.

    conv: weights, biases and activation, as a `cases.Convolution` has them. cu_seqlens: of the whole problem.
    raw: the convolutions' inputs by name, the share's tokens. halos: by name, [pieces, W-1, channels] of which only the
    first piece's row can be other than zero.
    """

    def __init__(self, conv, segments, rank, cu_seqlens, raw, halos):
        self.conv, self.segments, self.segment = conv, segments, segments[rank]
        self.cu_seqlens, self.raw, self.halos = cu_seqlens, raw, halos

    def forward(self, name):
        """q, k or v: the convolution's output, shaped and typed as its input."""
        return short_conv(self.raw[name], self.conv.weights[name], self.conv.biases.get(name), self.conv.activation,
                          self.segment.cu_seqlens, self.halos[name])

    def backward(self, name, dy, transport):
        """(gradient of the raw input, of the weights, of the bias or None); the last two of this share alone.

        Collective: halo gradients go round. Sums are made in the working type before any rounding.
        """
        raw = self.raw[name]
        wide = np.dtype("f8" if raw.dtype == np.float64 else "f4")
        dx, dweight, dbias, dhalo = short_conv_backward(
            dy.astype(wide), raw.astype(wide), self.conv.weights[name], self.conv.biases.get(name),
            self.conv.activation, self.segment.cu_seqlens, self.halos[name])
        W, channels = dhalo.shape[1] + 1, dhalo.shape[2]
        spans = [halo_tokens(segment, self.cu_seqlens, W) for segment in self.segments]
        lengths = [(last - first) * channels for first, last in spans]
        mine = dhalo[0, W - 1 - lengths[transport.rank] // channels :] if lengths[transport.rank] else dhalo[:0]
        mine = to_host(mine)
        parts = transport.gather(mine.ravel(), lengths, f"gathering the halo gradients of {name}")
        rows = dx.reshape(len(dx), channels)
        for (first, last), part in zip(spans, parts):
            here, there = max(first, self.segment.start), min(last, self.segment.stop)
            if here < there:
                received = part.reshape(last - first, channels)[here - first : there - first]
                mine = slice(here - self.segment.start, there - self.segment.start)
                rows[mine] += array_module(rows).asarray(received)
        return dx.astype(raw.dtype), dweight, dbias


def halo_tokens(segment, cu_seqlens, W):
    """Packed tokens [first, last) that a segment needs from earlier ranks: at most W-1 of the same sequence."""
    if segment.left is None:
        return segment.start, segment.start
    return max(int(cu_seqlens[segment.left.sequence]), segment.start - (W - 1)), segment.start
