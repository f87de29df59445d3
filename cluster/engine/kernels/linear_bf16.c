/*
 * Products by dot products of pairs of bfloat16 numbers (AVX512-BF16): a lane is an output, as in linear_portable.c, and
 * takes two inputs at once.
 */
#include "instruction_sets.h"

#if KNOWS_AVX512_BF16

#include "blocks.h"
#include "linear.h"

#define BF16_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#define BF16_INLINE static inline __attribute__((always_inline)) BF16_TARGET /* INLINE has a target already */
#define MAX_HEIGHT 24 /* rows of a tile whose sums with one tile of a block fit into registers */
#define FITTING_HEIGHT 14 /* the same with both tiles of a block, in addition to a pair and an input */
/* Up to here a tile of rows is multiplied by both tiles of each block, else by all blocks' first tiles and then by all
   second ones. */
#define MAX_WIDE_HEIGHT(format) ((format) == BFLOAT16 ? 16 : FITTING_HEIGHT)
#define MAX_FEW_ROWS 40 /* up to this number of rows integers are multiplied in tiles of up to MAX_HEIGHT */
#define PREFETCH_BYTES 8192
/* Few rows are bound by reading weights: prefetch into L1 (190M parameters, 1 row, Zen 4, 1 thread: 12.5 ms; into L2: 17 ms). */
#define MAX_STREAM_HEIGHT 4
#define STREAM_BYTES 4096
#define WIDENED_BLOCKS 4 /* so that the next can be begun while this one is in use */

typedef struct {
    const Linear *linear;
    Rows rows;
    Blocks blocks;
    Shares *panels;
} Job;

/* sum += the dot products of pairs of bfloat16 numbers. Clang (16, for example) recurses without end on its intrinsic. */
BF16_INLINE __m512 add_products(__m512 sum, __m512i weights, __m512i inputs) {
#ifdef __clang__
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
    return sum;
#else
    return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)inputs);
#endif
}

/* sums[row][tile] += the products of a pair of inputs, for `num_tiles` tiles from the one whose weights are given. */
BF16_INLINE void multiply_pair(__m512 sums[][2], const int tile, const uint16_t *weights, const uint16_t *rows,
                                      const int pair, const int height, const int num_tiles, const int is_prefetched) {
    __m512i pairs[2];
#pragma GCC unroll 2
    for (int v = 0; v < num_tiles; v++) {
        const uint16_t *of_tile = weights + v * TILE_VALUES + pair * BLOCK;
        if (is_prefetched && height <= MAX_STREAM_HEIGHT) _mm_prefetch((const char *)of_tile + STREAM_BYTES, _MM_HINT_T0);
        else if (is_prefetched) _mm_prefetch((const char *)of_tile + PREFETCH_BYTES, _MM_HINT_T1);
        pairs[v] = _mm512_loadu_si512(of_tile);
    }
#pragma GCC unroll 24
    for (int r = 0; r < height; r++) {
        int32_t inputs;
        __builtin_memcpy(&inputs, rows + r * BLOCK + 2 * pair, sizeof inputs);
#pragma GCC unroll 2
        for (int v = 0; v < num_tiles; v++)
            sums[r][tile + v] = add_products(sums[r][tile + v], pairs[v], _mm512_set1_epi32(inputs));
    }
}

/* Multiplies `height` rows by `width` tiles of a panel from its tile `first`, `at_once` tiles of a block at a time.
   height, width, at_once and format are constants after inlining. */
BF16_INLINE void multiply(const Job *j, int64_t panel, int64_t tile, const int first, const int height,
                                 const int width, const int at_once, const Format format) {
    const Weight *w = j->linear->weight;
    const Blocks *b = &j->blocks;
    const char *kept = (const char *)w->panels + panel * b->num_blocks * block_bytes(format);
    const float *scales = w->scales + (format >= INT8 ? panel * b->num_groups * BLOCK + first * LANES : 0);
    const uint16_t *rows = rows_of_block(&j->rows, b->num_blocks, tile, 0);
    _Alignas(64) uint16_t widened_blocks[WIDENED_BLOCKS][BLOCK_VALUES];
    __m512 sums[MAX_HEIGHT][2], of_groups[MAX_HEIGHT][2];
#pragma GCC unroll 24
    for (int r = 0; r < height; r++)
#pragma GCC unroll 2
        for (int v = 0; v < width; v++) sums[r][v] = of_groups[r][v] = _mm512_setzero_ps();
    for (int64_t group = 0; group < b->num_groups; group++) {
        for (int64_t i = 0; i < b->blocks_per_group; i++) {
            const uint16_t *weights = (const uint16_t *)kept;
            if (format >= INT8) {
                for (int byte = 0; byte < block_bytes(format); byte += 64)
                    _mm_prefetch(kept + PREFETCH_BYTES + byte, _MM_HINT_T1);
                uint16_t *block = widened_blocks[i % WIDENED_BLOCKS];
                widen_block(kept, format, block);
                weights = block;
            }
#pragma GCC unroll 2
            for (int t = 0; t < width; t += at_once) {
                const uint16_t *of_tiles = weights + (first + t) * TILE_VALUES;
                if (format == BFLOAT16) {
                    /* Else the compiler unrolls it for few rows: on Zen 5 four then take a third longer. Integers, which
                       lie in the first cache, gain by that. */
#pragma GCC unroll 1
                    for (int pair = 0; pair < LANES; pair++)
                        multiply_pair(sums, t, of_tiles, rows, pair, height, at_once, 1);
                } else {
                    for (int pair = 0; pair < LANES; pair++)
                        multiply_pair(sums, t, of_tiles, rows, pair, height, at_once, 0);
                }
            }
            kept += block_bytes(format);
            rows += height * BLOCK;
        }
        if (format < INT8) break; /* one group, without scales */
#pragma GCC unroll 24
        for (int r = 0; r < height; r++)
#pragma GCC unroll 2
            for (int v = 0; v < width; v++) {
                __m512 scale = _mm512_loadu_ps(scales + group * BLOCK + v * LANES);
                of_groups[r][v] = _mm512_fmadd_ps(sums[r][v], scale, of_groups[r][v]);
                sums[r][v] = _mm512_setzero_ps();
            }
    }
#pragma GCC unroll 24
    for (int r = 0; r < height; r++) {
        const int64_t row = tile * height + r;
        if (row >= j->linear->num_rows) break;
#pragma GCC unroll 2
        for (int v = 0; v < width; v++)
            store_sums(j->linear, row, panel * BLOCK + (first + v) * LANES, format >= INT8 ? of_groups[r][v] : sums[r][v]);
    }
}

/* All rows of a panel.

   Weights that come from memory are read in the order in which they lie: Zen 4 reads two streams, 1 KB apart, at half the
   speed (190M parameters, 2 threads, 1 row: 18 ms, and 11 in order). The first tile of rows brings them into the second
   cache, where both tiles of a block are at hand and an input is loaded once for both. */
BF16_INLINE void multiply_panel(const Job *j, int64_t panel, const Format format) {
    for (int64_t tile = 0; tile < j->rows.num_tiles; tile++) switch (j->rows.height) {
#define CASE(height) \
        case height: \
            if (height <= MAX_WIDE_HEIGHT(format)) { \
                if (format == BFLOAT16 && tile == 0) multiply(j, panel, tile, 0, height, 2, 1, format); \
                else multiply(j, panel, tile, 0, height, 2, 2, format); \
            } else if (format != BFLOAT16) { /* whose tiles are never so high */ \
                multiply(j, panel, tile, 0, height, 1, 1, format); \
                multiply(j, panel, tile, 1, height, 1, 1, format); \
            } \
            break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
        CASE(13) CASE(14) CASE(15) CASE(16) CASE(17) CASE(18) CASE(19) CASE(20) CASE(21) CASE(22) CASE(23) CASE(24)
#undef CASE
    }
}

BF16_TARGET static void share_task(const void *job, int64_t share) {
    const Job *j = job;
    for (int64_t panel; (panel = next_of(j->panels, share)) >= 0;) switch ((Format)j->linear->weight->format) {
        case BFLOAT16: multiply_panel(j, panel, BFLOAT16); break;
        case INT8: multiply_panel(j, panel, INT8); break;
        case INT4: multiply_panel(j, panel, INT4); break;
        case FLOAT32: break; /* never laid out in blocks */
    }
}

/* Returns the maximum rows of a tile. The sums of a tile should fit into registers, but integers are widened again for
   each tile, so few high tiles are faster for few rows. */
static int64_t max_height(Format format, int64_t num_rows) {
    if (format == BFLOAT16) return num_rows <= MAX_WIDE_HEIGHT(BFLOAT16) ? MAX_WIDE_HEIGHT(BFLOAT16) : FITTING_HEIGHT;
    return num_rows <= MAX_FEW_ROWS ? MAX_HEIGHT : FITTING_HEIGHT;
}

void linear_bf16(const Linear *l, int num_threads) {
    if (l->num_rows == 0) return;
    Shares panels;
    const int64_t height = max_height((Format)l->weight->format, l->num_rows);
    const Job job = {l, round_rows(l, height, num_threads), blocks_of(l->weight), &panels};
    divide(&panels, job.blocks.num_panels, num_threads);
    parallel_for(share_task, &job, panels.num_shares, num_threads);
}

#endif
