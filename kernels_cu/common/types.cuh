// Integer names of fixed width. Every offset into global memory is an i64: T * HV * K passes 2^31 in real use.
#pragma once

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

static_assert(sizeof(u16) == 2 && sizeof(u32) == 4 && sizeof(u64) == 8 && sizeof(i64) == 8);
