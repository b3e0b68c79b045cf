// The sizes a kernel is compiled for. They come from the kernel table (kda_engine/device/kernels.py) as defines.
#pragma once

// Tokens per chunk.
constexpr int kChunk = KDA_CHUNK;
static_assert(kChunk == 16, "the pairwise levels, the solve and the fragments are written for 16 tokens");
