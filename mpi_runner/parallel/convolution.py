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

    def backward(self, name, dy, transport, pieces=None):
        """(gradient of the raw input, of the weights, of the bias or None); the last two of this share alone.

        Collective: halo gradients go round. Sums are made in the working type before any rounding. pieces: by sequence
        the spans of tokens that are summed by themselves; weights and bias then have a row for each.
        """
        raw = self.raw[name]
        wide = np.dtype("f8" if raw.dtype == np.float64 else "f4")
        dy, x, halo = dy.astype(wide), raw.astype(wide), self.halos[name]
        if pieces is None:
            dx, dweight, dbias, dhalo = self._adjoint(name, dy, x, self.segment.cu_seqlens, halo)
        else:
            dx, dweight, dbias, dhalo = self._adjoint_by_pieces(name, dy, x, halo, pieces)
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

    def _adjoint(self, name, dy, x, cu_seqlens, halo):
        return short_conv_backward(dy, x, self.conv.weights[name], self.conv.biases.get(name), self.conv.activation,
                                   cu_seqlens, halo)

    def _adjoint_by_pieces(self, name, dy, x, halos, pieces):
        """The same of every piece by itself, on the host; a piece's halo gradient is added to the piece before."""
        weight, bias = self.conv.weights[name], self.conv.biases.get(name)
        channels, W = weight.shape
        dx, dhalo = np.zeros_like(x), np.zeros(halos.shape, x.dtype)
        rows, d_rows = x.reshape(len(x), channels), dx.reshape(len(x), channels)
        dweights, dbiases = [np.zeros((0, channels, W), x.dtype)], [np.zeros((0, channels), x.dtype)]
        for n, spans in enumerate(pieces):
            for number, (a, b) in enumerate(spans):
                halo = rows[a - (W - 1) : a][None] if number else halos[n : n + 1]
                d, dweight, dbias, d_before = self._adjoint(name, dy[a:b], x[a:b], np.array([0, b - a]), halo)
                dx[a:b] += d
                if number:
                    d_rows[a - (W - 1) : a] += d_before[0]
                else:
                    dhalo[n] = d_before[0]
                dweights.append(dweight[None])
                dbiases += [] if bias is None else [dbias[None]]
        return dx, np.concatenate(dweights), None if bias is None else np.concatenate(dbiases), dhalo


def halo_tokens(segment, cu_seqlens, W):
    """Packed tokens [first, last) that a segment needs from earlier ranks: at most W-1 of the same sequence."""
    if segment.left is None:
        return segment.start, segment.start
    return max(int(cu_seqlens[segment.left.sequence]), segment.start - (W - 1)), segment.start
