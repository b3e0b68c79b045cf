"""KDA inside an MPI program: every rank hands in its own tokens. mpirun -n 4 python examples/own_communicator.py"""

import numpy as np
from mpi4py import MPI

import kda_engine as kda

comm = MPI.COMM_WORLD
cu_seqlens = [0, 300, 4096]  # two sequences; ranks hold their packed tokens in rank order
mine = kda.distributed.share(comm, cu_seqlens)

H, K, V = 4, 64, 64
random = np.random.default_rng(comm.rank)
tokens = mine.stop - mine.start
q, k, g = (random.standard_normal((tokens, H, K), dtype=np.float32) for _ in range(3))
v = random.standard_normal((tokens, H, V), dtype=np.float32)
beta = random.standard_normal((tokens, H), dtype=np.float32)

fwd = kda.distributed.forward(comm, q, k, v, g, beta, cu_seqlens=cu_seqlens)
grads = kda.distributed.backward(fwd, d_out=np.ones_like(fwd.out))
print(f"rank {comm.rank}: tokens {mine.start}:{mine.stop}, sequences {list(mine.ended)} end here, scan {fwd.scan}, "
      f"|out| {np.linalg.norm(fwd.out):.3f}, |dq| {np.linalg.norm(grads.dq):.3f}", flush=True)
