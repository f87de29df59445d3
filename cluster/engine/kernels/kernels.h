/*
 * The CPU engine's kernels: AVX-512, float32 arithmetic; weights in float32, bfloat16 or integers, KV in float32
 * or bfloat16. Products with weights that are not in float32 use the units for bfloat16 where there are any.
 *
 * A row's result has the same bits whatever the other rows of a step, the number of threads and the way a prompt
 * is cut into chunks: every sum runs in an order that is fixed by the model's shape and the row's position.
 */
#ifndef OUTRIDER_KERNELS_H
#define OUTRIDER_KERNELS_H

#include <immintrin.h>
#include <stdatomic.h>
#include <stdint.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 16

/* parallel.c: task(job, i) for every i below count, on up to num_threads threads, the caller's included. */
typedef void (*Task)(const void *job, int64_t item);
void parallel_for(Task task, const void *job, int64_t count, int num_threads);
/*
 * Items that threads take one by one, each beginning with neighbouring ones of its own, and ending by helping others with
 * theirs. Threads that write neighbours would wait for each other's cache lines.
 */
#define MAX_SHARES 64
typedef struct {
    int64_t count, num_shares;
    _Atomic int64_t next[MAX_SHARES];
} Shares;
void divide(Shares *shares, int64_t count, int num_threads);
int64_t next_of(Shares *shares, int64_t share); /* an item, or -1 when none is left */
/* As many threads as are worth waking for that much; num_threads or 1. */
int useful_threads(int64_t num_rows, int64_t row_size, int num_threads);

/* instruction_sets.c */
typedef enum { AVX512, AVX512_BF16, AMX, AMX_EMULATED } InstructionSet; /* of products; the last one for tests */
int is_supported(InstructionSet set); /* here: by compiler, processor and system */

/* linear.c */
typedef enum { FLOAT32, BFLOAT16, INT8, INT4 } Format; /* of weights */
typedef struct {
    const void *panels;  /* for AVX512 as linear_avx512.c says, else as blocks.h does */
    const float *scales; /* integers only: [panels, in_features / group_size, outputs of a panel] */
    const float *bias;   /* [out_features] or NULL */
    int64_t in_features, out_features, group_size;
    int64_t format;          /* a Format */
    int64_t instruction_set; /* an InstructionSet; of weights in FLOAT32 always AVX512 */
} Weight;
typedef struct {
    const float *x; /* [num_rows, in_features] */
    const Weight *weight;
    float *y;       /* [num_rows, out_features] */
    float *scratch; /* [num_rows, linear_scratch_size(weight)], on a boundary of 64 bytes */
    int64_t num_rows;
} Linear;
int64_t linear_scratch_size(const Weight *weight);
void linear(const Linear *linear, int num_threads);

/* attention.c */
typedef struct {
    const float *qkv;            /* [num_rows, (num_heads + 2 * num_kv_heads) * head_dim]; queries rotated */
    const void *keys, *values;   /* [num_slots, num_kv_heads, head_dim] */
    float *y;                    /* [num_rows, num_heads * head_dim] */
    const int64_t *row_starts;   /* [num_segments + 1] */
    const int64_t *prefix_lens;  /* [num_segments]: tokens before the segment; in a tree, before its first node */
    const int64_t *block_tables; /* [num_segments, table_len] */
    const int64_t *positions;    /* [num_rows] */
    const int64_t *paths;        /* NULL without trees; [num_rows, path_len]: nodes from a root to this row's, then -1;
                                    all -1 where the segment is a chain */
    int64_t path_len, num_segments, table_len, block_size, num_heads, num_kv_heads, head_dim;
    int64_t span; /* positions that a row sees at most, itself included */
    int is_bfloat16;
    int64_t instruction_set; /* an InstructionSet; for tiles keys and values have to be in bfloat16 */
} Attention;
int attention(const Attention *attention, int num_threads); /* 0, or -1 without memory */

/* elementwise.c */
typedef struct {
    float *hidden;       /* [num_rows, size]; delta is added to it */
    const float *delta;  /* [num_rows, size] or NULL */
    const float *weight; /* [size], or NULL: y is a copy of hidden */
    float *y;            /* [num_rows, size] */
    int64_t size;
    float eps;
} Norm;
void add_rms_norm(const Norm *norm, int64_t num_rows, int num_threads);

typedef struct {
    const float *x; /* [num_rows, 2 * size]: gate, up */
    float *y;       /* [num_rows, size] */
    int64_t size;
} Gate;
void silu_and_mul(const Gate *gate, int64_t num_rows, int num_threads);

typedef struct {
    float *qkv;               /* as above; queries are rotated in place */
    const float *norm;        /* [num_heads + num_kv_heads, head_dim], or NULL: no norm before the rotation */
    const float *cos, *sin;   /* [max_position, head_dim / 2] */
    const int64_t *positions; /* [num_rows] */
    const int64_t *slots;     /* [num_rows] */
    void *keys, *values;      /* [num_slots, num_kv_heads, head_dim] */
    int64_t num_heads, num_kv_heads, head_dim;
    int is_bfloat16;
    float eps; /* of the norm */
} Rotary;
void rotate_and_store(const Rotary *rotary, int64_t num_rows, int num_threads);

/* decoder.c */
typedef struct { /* 64-bit numbers only: Python fills it as a row of a table */
    const float *input_norm, *post_attention_norm; /* [hidden_size] */
    const float *qk_norm;                          /* as in Rotary */
    Weight qkv, output, gate_up, down;
    void *keys, *values;
    int64_t span;
} Layer;
#define AFTER_NORM (-1)
typedef struct { /* likewise */
    const Layer *layers;
    const void *embedding; /* [vocab_size, hidden_size], of the same dtype as the KV cache */
    const float *cos, *sin;
    const float *norm; /* [hidden_size], or NULL: no norm before the output layer */
    Weight head;
    void *states;                   /* [num_slots, num_captured, hidden_size], of the same dtype as the KV cache */
    const int64_t *captured_layers; /* [num_captured]: how many layers precede a state, or AFTER_NORM */
    int64_t num_captured;
    int64_t num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, block_size, is_bfloat16;
} Model;
typedef struct {
    float *logits;  /* [num_logit_rows, vocab_size] */
    float *scratch; /* [num_rows, scratch_size(model)] */
    const float *residual;        /* [num_rows, hidden_size], or NULL: the embeddings of token_ids */
    const float *attention_input; /* [num_rows, in_features of the first layer's qkv]; NULL if residual is NULL */
    const int64_t *token_ids, *logit_rows, *positions, *slots, *row_starts, *prefix_lens, *block_tables, *paths;
    int64_t num_rows, num_logit_rows, num_segments, table_len, path_len;
    float eps;
} Step;
int64_t scratch_size(const Model *model);
int decode(const Model *model, const Step *step, int num_threads); /* 0, or -1 without memory */

INLINE __mmask16 first_lanes(int64_t count) { return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1); }

INLINE __m512 widen(__m256i halves) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

/* Lanes of element `index` and after, of a float32 or bfloat16 array. */
INLINE __m512 load(const void *array, int64_t index, __mmask16 mask, int is_bfloat16) {
    if (!is_bfloat16) return _mm512_maskz_loadu_ps(mask, (const float *)array + index);
    return widen(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)array + index));
}

/* Rounds to nearest, ties to even, as PyTorch does. */
INLINE void store(void *array, int64_t index, __mmask16 mask, __m512 x, int is_bfloat16) {
    if (!is_bfloat16) {
        _mm512_mask_storeu_ps((float *)array + index, mask, x);
        return;
    }
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    /* Rounding could turn a NaN into an infinity. */
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    rounded = _mm512_mask_mov_epi32(rounded, is_nan, _mm512_set1_epi32(0x7fc00000));
    _mm256_mask_storeu_epi16((uint16_t *)array + index, mask, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}

/* e^x within 2 units in the last place; x is clamped to where e^x is a normal number. */
INLINE __m512 exp_ps(__m512 x) {
    x = _mm512_min_ps(_mm512_max_ps(x, _mm512_set1_ps(-87.0f)), _mm512_set1_ps(88.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x); /* ln 2 in two parts */
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.0f / 5040);
    const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 7; i++) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(coefficients[i]));
    return _mm512_scalef_ps(p, n);
}

#endif
