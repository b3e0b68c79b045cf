"""The operator under the names, defaults and return values of another library, for those who have code that calls it."""

from .flash_linear_attention import chunk_kda, chunk_kda_with_backward, fused_recurrent_kda

__all__ = ["chunk_kda", "chunk_kda_with_backward", "fused_recurrent_kda"]
