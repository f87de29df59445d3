/* The forms of the kernels: which the compiler can make, and which of the portable ones is in use. */
#ifndef OUTRIDER_INSTRUCTION_SETS_H
#define OUTRIDER_INSTRUCTION_SETS_H

#include "kernels.h"

#if !defined(__x86_64__)
#define KNOWS_AVX512_BF16 0
#define KNOWS_AMX 0
#elif defined(__clang__)
#define KNOWS_AVX512_BF16 (__clang_major__ >= 9)
#define KNOWS_AMX (__clang_major__ >= 12)
#else
#define KNOWS_AVX512_BF16 (__GNUC__ >= 10)
#define KNOWS_AMX (__GNUC__ >= 11)
#endif

struct Parts; /* of attention.h */

/* The kernels that compute in float32, for one width of registers. */
typedef struct {
    void (*linear)(const Linear *, int num_threads);
    void (*attention)(const struct Parts *, int num_threads);
    void (*add_rms_norm)(const Norm *, int64_t num_rows, int num_threads);
    void (*gate_and_multiply)(const Gate *, int64_t num_rows, int num_threads);
    void (*rotate_and_store)(const Rotary *, int64_t num_rows, int num_threads);
    /* widen: from the dtype of an array to float32; narrow: back. */
    void (*widen)(const void *array, int64_t index, int64_t count, int is_bfloat16, float *to);
    void (*narrow)(const float *from, int64_t count, int is_bfloat16, void *array, int64_t index);
} Portable;
extern const Portable portable_4, portable_8, portable_16;
extern const Portable *portable; /* the ones in use; NULL where none is fast */

#endif
