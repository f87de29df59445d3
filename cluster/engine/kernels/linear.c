/*
 * y = x W^T at the speed at which W can be read, up to the number of rows where arithmetic takes longer.
 *
 * Weights lie in panels of 64 outputs, in the order in which they are used: one stream from memory, and one
 * output a lane, so that no sum crosses lanes. oneDNN's kernels for a handful of rows emulate bfloat16 on
 * processors without such units, and lay weights out again at every call unless they are packed.
 */
#include "kernels.h"

#define MAX_ROWS 8       /* of a tile; its sums stay in registers */
#define MAX_WIDE_ROWS 6  /* up to here a tile is a whole panel wide, else half of one */
/* How far ahead weights are asked for: the processor's own prefetching leaves memory idle while a tile computes
   (190M parameters in bfloat16, 2 threads, 8 rows: 37 ms without, 23 with). */
#define PREFETCH_INPUTS 32

/*
 * 32 weights of one input. In bfloat16 a 32-bit word holds those of outputs i (low half) and i + 16 (high):
 * one instruction widens 16 of them.
 */
INLINE void load_pair(const void *panels, int64_t index, __m512 *low, __m512 *high, const int is_bfloat16) {
    if (!is_bfloat16) {
        *low = _mm512_loadu_ps((const float *)panels + index);
        *high = _mm512_loadu_ps((const float *)panels + index + LANES);
        return;
    }
    __m512i words = _mm512_loadu_si512((const uint16_t *)panels + index);
    *low = _mm512_castsi512_ps(_mm512_slli_epi32(words, 16));
    *high = _mm512_castsi512_ps(_mm512_and_si512(words, _mm512_set1_epi32((int)0xffff0000)));
}

/* All weights of one input, to the first cache. */
INLINE void prefetch(const void *panels, int64_t index, const int is_bfloat16) {
    const char *line = (const char *)panels + index * (is_bfloat16 ? 2 : 4);
    for (int i = 0; i < PANEL * (is_bfloat16 ? 2 : 4); i += 64) _mm_prefetch(line + i, _MM_HINT_T0);
}

/* `rows` x 32 * `pairs` outputs from `out`. rows, pairs and is_bfloat16 are constants after inlining. */
INLINE void tile(const Linear *l, int64_t row, int64_t out, const int rows, const int pairs, const int is_bfloat16) {
    __m512 sums[MAX_ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * pairs; v++) sums[r][v] = _mm512_setzero_ps();
    const float *x = l->x + row * l->in_features;
    const int64_t n = l->in_features;
    int64_t index = out / PANEL * PANEL * n + out % PANEL;
    for (int64_t i = 0; i < n; i++, index += PANEL) {
        __m512 weights[4];
        prefetch(l->panels, index + PREFETCH_INPUTS * PANEL, is_bfloat16);
#pragma GCC unroll 2
        for (int p = 0; p < pairs; p++)
            load_pair(l->panels, index + 32 * p, &weights[2 * p], &weights[2 * p + 1], is_bfloat16);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512 input = _mm512_set1_ps(x[r * n + i]);
#pragma GCC unroll 4
            for (int v = 0; v < 2 * pairs; v++) sums[r][v] = _mm512_fmadd_ps(input, weights[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < 2 * pairs; v++) {
            int64_t first = out + LANES * v;
            if (first < l->out_features)
                _mm512_mask_storeu_ps(l->y + (row + r) * l->out_features + first,
                                      first_lanes(l->out_features - first), sums[r][v]);
        }
}

INLINE void tile_of_rows(const Linear *l, int64_t row, int rows, int64_t out, const int pairs, const int bf16) {
    switch (rows) {
        case 1: tile(l, row, out, 1, pairs, bf16); break;
        case 2: tile(l, row, out, 2, pairs, bf16); break;
        case 3: tile(l, row, out, 3, pairs, bf16); break;
        case 4: tile(l, row, out, 4, pairs, bf16); break;
        case 5: tile(l, row, out, 5, pairs, bf16); break;
        case 6: tile(l, row, out, 6, pairs, bf16); break;
        case 7: if (pairs == 1) tile(l, row, out, 7, 1, bf16); break;
        default: if (pairs == 1) tile(l, row, out, 8, 1, bf16); break;
    }
}

/* All rows of one panel, in tiles of equal height. */
INLINE void panel(const Linear *l, int64_t out, const int bf16) {
    if (l->num_rows <= MAX_WIDE_ROWS) {
        tile_of_rows(l, 0, (int)l->num_rows, out, 2, bf16);
        return;
    }
    int64_t num_tiles = (l->num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int half = 0; half < 2; half++)
        for (int64_t t = 0; t < num_tiles; t++) {
            int64_t row = l->num_rows * t / num_tiles, end = l->num_rows * (t + 1) / num_tiles;
            tile_of_rows(l, row, (int)(end - row), out + 32 * half, 1, bf16);
        }
}

TARGET static void panel_task(const void *job, int64_t item) {
    const Linear *l = job;
    if (l->is_bfloat16) panel(l, item * PANEL, 1);
    else panel(l, item * PANEL, 0);
}

void linear(const Linear *l, int num_threads) {
    if (l->num_rows == 0) return;
    parallel_for(panel_task, l, (l->out_features + PANEL - 1) / PANEL, num_threads);
}
