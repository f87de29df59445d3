/*
 * Products in float32, for weights in float32, and in every format where the processor has nothing better.
 *
 * Weights lie in panels of 64 outputs, in the order in which they are used: one stream from memory, and one
 * output a lane, so that no sum crosses lanes. oneDNN's kernels for a handful of rows emulate bfloat16 on
 * processors without such units, and lay weights out again at every call unless they are packed.
 *
 * The 64 weights of one input (of two, in INT4), where o counts the panel's outputs:
 *   FLOAT32, INT8   in the order of o
 *   BFLOAT16        32-bit words, of outputs o (low half) and o + 16 (high), for o in 0..15, then for o in 32..47
 *   INT4            32-bit words, for o in 0..15: nibbles of outputs o, o + 16, o + 32, o + 48 for the first input,
 *                   then for the second
 * Integers are multiplied by the scale of their output and group of inputs as they are read.
 */
#include "linear.h"

#define PANEL 64  /* outputs whose weights lie together */
#define MAX_ROWS 8 /* of a tile; its sums stay in registers */
/* Up to here a tile is a whole panel wide, else half of one. Integers need registers for their scales. */
#define MAX_WIDE_ROWS(format) ((format) <= BFLOAT16 ? 6 : 4)
/* How far ahead weights are asked for: the processor's own prefetching leaves memory idle while a tile computes
   (190M parameters in bfloat16, 2 threads, 8 rows: 37 ms without, 23 with). */
#define PREFETCH_BYTES 4096

INLINE int64_t bytes_per_input(const Format format) {
    return format == FLOAT32 ? 4 * PANEL : format == BFLOAT16 ? 2 * PANEL : format == INT8 ? PANEL : PANEL / 2;
}

/*
 * Weights of input `i` for 16 * `vectors` outputs from the panel's output `first` (0 or 32). `scales` are theirs;
 * format and vectors are constants after inlining.
 */
INLINE void load_weights(const char *panel, int64_t i, int64_t first, const int vectors, const Format format,
                         const __m512 *scales, __m512 *weights) {
    const char *input = panel + i * bytes_per_input(format);
    if (format == FLOAT32) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) weights[v] = _mm512_loadu_ps((const float *)input + first + LANES * v);
    } else if (format == BFLOAT16) {
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v += 2) {
            __m512i words = _mm512_loadu_si512((const uint16_t *)input + first + LANES * v);
            weights[v] = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
            weights[v + 1] = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
        }
    } else if (format == INT8) {
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            __m128i bytes = _mm_loadu_si128((const __m128i *)(input + first + LANES * v));
            weights[v] = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scales[v]);
        }
    } else {
        const __m512 values = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
        __m512i words = _mm512_loadu_si512(panel + (i & ~(int64_t)1) * bytes_per_input(format));
        words = _mm512_srlv_epi32(words, _mm512_set1_epi32((int)(16 * (i & 1) + first / 4)));
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) /* the lookup regards the four lowest bits of each lane */
            weights[v] = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(words, 4 * v), values), scales[v]);
    }
}

/* `rows` x 16 * `vectors` outputs from `out`. rows, vectors and format are constants after inlining. */
INLINE void tile(const Linear *l, int64_t row, int64_t out, const int rows, const int vectors, const Format format) {
    __m512 sums[MAX_ROWS][4], scales[4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_setzero_ps();
    const float *x = l->x + row * l->weight->in_features;
    const int64_t n = l->weight->in_features, group_size = format >= INT8 ? l->weight->group_size : n, first = out % PANEL;
    const char *panel = (const char *)l->weight->panels + out / PANEL * n * bytes_per_input(format);
    const float *group_scales = l->weight->scales + (format >= INT8 ? out / PANEL * (n / group_size) * PANEL + first : 0);
    for (int64_t start = 0; start < n; start += group_size, group_scales += PANEL) {
        if (format >= INT8) {
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) scales[v] = _mm512_loadu_ps(group_scales + LANES * v);
        }
        for (int64_t i = start; i < start + group_size; i++) {
            const char *ahead = panel + i * bytes_per_input(format) + PREFETCH_BYTES;
#pragma GCC unroll 4
            for (int b = 0; b < bytes_per_input(format); b += 64) _mm_prefetch(ahead + b, _MM_HINT_T0);
            __m512 weights[4];
            load_weights(panel, i, first, vectors, format, scales, weights);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                __m512 input = _mm512_set1_ps(x[r * n + i]);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) sums[r][v] = _mm512_fmadd_ps(input, weights[v], sums[r][v]);
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            int64_t o = out + LANES * v;
            if (o >= l->weight->out_features) continue;
            const __mmask16 mask = first_lanes(l->weight->out_features - o);
            if (l->weight->bias != NULL)
                sums[r][v] = _mm512_add_ps(sums[r][v], _mm512_maskz_loadu_ps(mask, l->weight->bias + o));
            _mm512_mask_storeu_ps(l->y + (row + r) * l->weight->out_features + o, mask, sums[r][v]);
        }
}

INLINE void tile_of_rows(const Linear *l, int64_t row, int rows, int64_t out, const int vectors, const Format format) {
#define CASE(n) \
    case n: \
        if (vectors == 2 || n <= MAX_WIDE_ROWS(format)) tile(l, row, out, n, vectors, format); \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
#undef CASE
}

/* All rows of one panel, in tiles of equal height. */
INLINE void panel(const Linear *l, int64_t out, const Format format) {
    if (l->num_rows <= MAX_WIDE_ROWS(format)) {
        tile_of_rows(l, 0, (int)l->num_rows, out, 4, format);
        return;
    }
    int64_t num_tiles = (l->num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int half = 0; half < 2; half++)
        for (int64_t t = 0; t < num_tiles; t++) {
            int64_t row = l->num_rows * t / num_tiles, end = l->num_rows * (t + 1) / num_tiles;
            tile_of_rows(l, row, (int)(end - row), out + 32 * half, 2, format);
        }
}

typedef struct {
    const Linear *linear;
    Shares *panels;
} Job;

TARGET static void share_task(const void *job, int64_t share) {
    const Job *j = job;
    const Linear *l = j->linear;
    for (int64_t item; (item = next_of(j->panels, share)) >= 0;) switch ((Format)l->weight->format) {
        case FLOAT32: panel(l, item * PANEL, FLOAT32); break;
        case BFLOAT16: panel(l, item * PANEL, BFLOAT16); break;
        case INT8: panel(l, item * PANEL, INT8); break;
        case INT4: panel(l, item * PANEL, INT4); break;
    }
}

void linear_avx512(const Linear *l, int num_threads) {
    Shares panels;
    const Job job = {l, &panels};
    divide(&panels, (l->weight->out_features + PANEL - 1) / PANEL, num_threads);
    parallel_for(share_task, &job, panels.num_shares, num_threads);
}
