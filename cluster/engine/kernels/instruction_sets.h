/* What the compiler can make, for whatever processor. */
#ifndef OUTRIDER_INSTRUCTION_SETS_H
#define OUTRIDER_INSTRUCTION_SETS_H

#ifdef __clang__
#define KNOWS_AVX512_BF16 (__clang_major__ >= 9)
#define KNOWS_AMX (__clang_major__ >= 12)
#else
#define KNOWS_AVX512_BF16 (__GNUC__ >= 10)
#define KNOWS_AMX (__GNUC__ >= 11)
#endif

#endif
