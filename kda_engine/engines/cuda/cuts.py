"""What the certified rule dropped at cuts within a device, and bounds on what that cost, found when asked for."""

from dataclasses import dataclass

import cupy
import numpy as np

from ...decay import norm_bounds, passed_on
from ...layout import CHUNK, Operands


# Made in every certified call and therefore not frozen, as `slabs.Kept`.
@dataclass
class Cuts:
    """The cuts of one pass over a problem, with what the device decided about them. All of it must stay as it was.

    boundary: what the pass began with: the initial states [N,HV,K,V], the final states' gradient where d_out [T,HV,V]
    says that it went backwards; None for zeros. decided: Workspace with `warmup` [cuts,HV] int32: chunks next to the
    cut that were run from zero, all before them dropped; -1 where nothing was dropped.
    """

    problem: object
    plan: object
    boundary: object
    d_out: object
    decided: object

    @property
    def warmup(self):
        return self.decided.warmup

    def rows(self, measure, first_token=0, first_sequence=0):
        """A report's row for every cut at which a head was dropped; tokens and sequences counted from those.

        bound: e^(bound of the warm-up) times a bound on the norm of what it multiplied, a Frobenius norm [HV].
        """
        problem, plan, backward = self.problem, self.plan, self.d_out is not None
        warmup, found = self._decisions(), []
        for n in np.unique(plan.cut_sequences[(warmup >= 0).any(axis=1)]):
            start, stop = problem.cu_seqlens[n : n + 2].tolist()
            logs, norms = self._of_sequence(measure, int(n), start, stop)
            for slot in np.flatnonzero(plan.cut_sequences == n):
                dropped = warmup[slot] >= 0
                if not dropped.any():
                    continue
                at, chunks = (int(plan.cut_tokens[slot]) - start) // CHUNK, np.where(dropped, warmup[slot], 0)
                log_norm, bound = np.zeros(len(dropped)), np.zeros(len(dropped))
                for head in np.flatnonzero(dropped):
                    far = at + chunks[head] if backward else at - chunks[head]
                    log_norm[head] = logs[min(at, far) : max(at, far), head].sum()
                    bound[head] = passed_on(log_norm[head], norms[far, head])
                found.append({
                    "direction": "backward" if backward else "forward", "where": "device",
                    "sequence": first_sequence + int(n), "token": first_token + int(plan.cut_tokens[slot]),
                    "rule": "certified", "num_warmup": chunks.tolist(), "fallback": (~dropped).tolist(),
                    "log_norm": log_norm.tolist(), "bound": bound.tolist()})
        return found

    def _of_sequence(self, measure, n, start, stop):
        """Of one sequence: (sums of m over its chunks [chunks,HV], bounds on the norm between them [chunks + 1,HV])."""
        problem, backward = self.problem, self.d_out is not None
        rows = {name: getattr(problem, name)[start:stop] for name in ("q", "k", "v", "g", "beta")}
        if backward:
            # The output's gradient takes the place of v, which the state's gradient does not depend on.
            rows["v"] = self.d_out[start:stop]
        piece = Operands(**rows, A_log=problem.A_log, dt_bias=problem.dt_bias, cu_seqlens=np.array([0, stop - start]),
                         state_dtype=np.dtype("f4"))
        logs, added = measure.by_chunk(piece, problem.options, backward)
        boundary = np.zeros(problem.value_heads) if self.boundary is None else self._norms(n)
        if not backward:
            return logs, norm_bounds(logs, added, boundary)
        added = abs(problem.activation.scale) * added
        return logs, norm_bounds(logs[::-1], added[::-1], boundary)[::-1]

    def _decisions(self):
        """What `decided` holds, on the host."""
        # It may have been made on another stream.
        cupy.cuda.Device().synchronize()
        shape = self.plan.slots, self.problem.value_heads
        memory = cupy.cuda.UnownedMemory(self.warmup, 4 * shape[0] * shape[1], self.decided)
        return cupy.ndarray(shape, "i4", memptr=cupy.cuda.MemoryPointer(memory, 0)).get()

    def _norms(self, n):
        """Of the boundary of one sequence [HV], on the host."""
        heads = self.boundary[n].reshape(self.problem.value_heads, -1)
        return cupy.linalg.norm(heads.astype("f8"), axis=1).get()
