#if defined(__x86_64__)

#include "blocks.h"

#include <string.h>

typedef struct {
    const Linear *linear;
    int64_t height;
} Job;

TARGET static void round_row(const void *job, int64_t row) {
    const Job *j = job;
    const Linear *l = j->linear;
    const Weight *w = l->weight;
    const Blocks b = blocks_of(w);
    const int64_t tile_size = j->height * BLOCK; /* of one block */
    uint16_t *y = (uint16_t *)l->scratch + row / j->height * b.num_blocks * tile_size + row % j->height * BLOCK;
    const float *x = l->x + row * w->in_features;
    for (int64_t group = 0; group < b.num_groups; group++, x += w->group_size)
        for (int64_t i = 0; i < b.blocks_per_group * BLOCK; i += BLOCK, y += tile_size) {
            if (row >= l->num_rows) {
                memset(y, 0, BLOCK * sizeof *y);
                continue;
            }
            for (int64_t half = 0; half < BLOCK; half += LANES) {
                const int64_t left = w->group_size - i - half;
                const __mmask16 mask = left > 0 ? first_lanes(left) : 0;
                store_halves(y + half, _mm512_maskz_loadu_ps(mask, x + i + half));
            }
        }
}

Rows round_rows(const Linear *l, int64_t max_height, int num_threads) {
    /* Of equal height, so that the fewest rows are noughts: fewer than there are tiles. They fit into the scratch of
       the real ones, whose numbers are half as long as they were. */
    const int64_t num_tiles = (l->num_rows + max_height - 1) / max_height;
    const int64_t height = num_tiles > 0 ? (l->num_rows + num_tiles - 1) / num_tiles : 0;
    const Job job = {l, height};
    parallel_for(round_row, &job, num_tiles * height, useful_threads(l->num_rows, l->weight->in_features, num_threads));
    return (Rows){(const uint16_t *)l->scratch, num_tiles, height};
}

#endif
