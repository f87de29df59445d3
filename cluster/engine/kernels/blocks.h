/*
 * Weights and rows as the units for bfloat16 take them: sums of products of two neighbouring inputs.
 *
 * Weights lie in panels of 32 outputs, a panel in blocks of 32 inputs. A block is two tiles of 16 outputs, a tile 16
 * pairs of inputs, a pair two bfloat16 numbers for each of the outputs:
 *   BFLOAT16   [panel, block, tile, pair, output, input of the pair]
 * and as integers, which become such a block before they are used:
 *   INT8       [panel, block, tile, pair, input of the pair, output]
 *   INT4       16-bit words [panel, block, tile, pair / 4, output, input of the pair], nibbles by pair % 4, lowest first
 * A group of inputs that share scales has blocks of its own. What is missing from a group's last block, and from the
 * last panel, is nought.
 *
 * Rows are rounded to bfloat16 once a call and lie in tiles of equal height, the last filled with rows of noughts:
 *   [tile, block, row of the tile, input]
 */
#ifndef OUTRIDER_BLOCKS_H
#define OUTRIDER_BLOCKS_H

#include "avx512.h"
#include "kernels.h"

#define BLOCK 32 /* inputs, and outputs, of a block */
#define BLOCK_VALUES (BLOCK * BLOCK)
#define TILE_VALUES (BLOCK_VALUES / 2)

typedef struct {
    int64_t num_panels;
    int64_t num_groups;
    int64_t blocks_per_group;
    int64_t num_blocks; /* of a panel */
} Blocks;

static inline Blocks blocks_of(const Weight *w) {
    const int64_t num_groups = w->in_features / w->group_size, blocks_per_group = (w->group_size + BLOCK - 1) / BLOCK;
    return (Blocks){(w->out_features + BLOCK - 1) / BLOCK, num_groups, blocks_per_group, num_groups * blocks_per_group};
}

/* blocks.c: rows in tiles of equal height, in l->scratch. */
typedef struct {
    const uint16_t *values;
    int64_t num_tiles, height;
} Rows;
Rows round_rows(const Linear *l, int64_t max_height, int num_threads);

static inline const uint16_t *rows_of_block(const Rows *rows, int64_t num_blocks, int64_t tile, int64_t block) {
    return rows->values + (tile * num_blocks + block) * rows->height * BLOCK;
}

/* As it is kept. */
static inline int64_t block_bytes(const Format format) {
    return format == BFLOAT16 ? 2 * BLOCK_VALUES : format == INT8 ? BLOCK_VALUES : BLOCK_VALUES / 2;
}

/* A block of integers, in bfloat16, which holds them exactly. */
INLINE void widen_block(const char *kept, const Format format, uint16_t *block) {
    if (format == INT8) {
        for (int pair = 0; pair < BLOCK; pair++) { /* of both tiles */
            const __m128i *bytes = (const __m128i *)(kept + pair * BLOCK);
            __m512i first = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes))));
            __m512i second = _mm512_castps_si512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(bytes + 1))));
            __m512i both = _mm512_mask_mov_epi16(_mm512_srli_epi32(first, 16), 0xaaaaaaaa, second);
            _mm512_store_si512(block + pair * BLOCK, both);
        }
    } else {
        /* 0 to 7, -8 to -1, twice: the lookup uses five bits, and the fifth belongs to the next nibble. */
        static const uint16_t values[BLOCK] = {
            0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
            0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
            0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80,
        };
        const __m512i table = _mm512_loadu_si512(values);
        for (int four = 0; four < BLOCK / 4; four++) {
            __m512i words = _mm512_loadu_si512(kept + four * 64);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++)
                _mm512_store_si512(
                    block + (4 * four + i) * BLOCK, _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4 * i), table));
        }
    }
}

/* 16 results of a row: with their bias, as far as there are outputs from `out`. */
INLINE void store_sums(const Linear *l, int64_t row, int64_t out, __m512 sums) {
    if (out >= l->weight->out_features) return;
    const __mmask16 mask = first_lanes(l->weight->out_features - out);
    if (l->weight->bias != NULL) sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, l->weight->bias + out));
    _mm512_mask_storeu_ps(l->y + row * l->weight->out_features + out, mask, sums);
}

#endif
