/* Products by instruction set, of which `linear` chooses the one that a weight was laid out for. */
#ifndef OUTRIDER_LINEAR_H
#define OUTRIDER_LINEAR_H

#include "kernels.h"

/* What the compiler can make, for whatever processor. */
#ifdef __clang__
#define KNOWS_AVX512_BF16 (__clang_major__ >= 9)
#define KNOWS_AMX (__clang_major__ >= 12)
#else
#define KNOWS_AVX512_BF16 (__GNUC__ >= 10)
#define KNOWS_AMX (__GNUC__ >= 11)
#endif

void linear_avx512(const Linear *linear, int num_threads);
void linear_bf16(const Linear *linear, int num_threads);
void linear_amx(const Linear *linear, int num_threads);
void linear_amx_emulated(const Linear *linear, int num_threads);

#endif
