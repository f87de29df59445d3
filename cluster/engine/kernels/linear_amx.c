/*
 * Products by tiles (Intel's AMX): 16 rows x 32 inputs times 32 inputs x 16 outputs at once. A panel of 32 outputs
 * takes up to two tiles of rows at a time, so that what is loaded is used twice.
 *
 * Compiled a second time by linear_amx_emulated.c.
 */
#include "instruction_sets.h"

#if KNOWS_AMX || defined(EMULATE_TILES)

#include "blocks.h"
#include "linear.h"
#include "tiles.h"

#ifdef EMULATE_TILES
#define LINEAR linear_amx_emulated
#else
#define LINEAR linear_amx
#endif

#define MAX_HEIGHT 16
/* Numbers of tiles: sums by tile of rows and tile of outputs, rows, weights. */
#define TOP_LEFT 0
#define TOP_RIGHT 1
#define BOTTOM_LEFT 2
#define BOTTOM_RIGHT 3
#define TOP 4
#define BOTTOM 5
#define LEFT 6
#define RIGHT 7
/* How far ahead weights are asked for, at least: the processor's own prefetching leaves memory idle. */
#define PREFETCH_BYTES(format) ((format) == BFLOAT16 ? 8192 : 4096)
/* Integers are widened two blocks ahead: a tile that is loaded at once waits until what it loads has left the store
   buffer (INT4 in groups of 32, 1 row: 47 ns a block without, 34 with). */
#define WIDENED_AHEAD 2
#define WIDENED_BLOCKS 4

typedef struct {
    const Linear *linear;
    Rows rows;
    Blocks blocks;
    Shares *panels;
} Job;

/*
 * What is asked for while a panel is in use. A panel is read once for every two tiles of rows, and only the first
 * reading waits for memory: so that memory is never idle, every reading asks for its share of what comes next. Ahead
 * of the first reading is then as much as it reads beyond its share.
 */
typedef struct {
    const char *position;
    int64_t step; /* bytes asked for with every block */
} Ahead;

INLINE Ahead ahead_of(const char *panel, int64_t panel_bytes, int64_t readings, const Format format) {
    const char *position = panel + panel_bytes - panel_bytes / readings + PREFETCH_BYTES(format);
    return (Ahead){position, (block_bytes(format) / readings + 63) / 64 * 64};
}

/* Into the first cache, or where more than that holds is ahead, into the second. */
INLINE void ask_ahead(Ahead *a, const int is_only, const Format format) {
    if (is_only) {
#pragma GCC unroll 32
        for (int64_t byte = 0; byte < block_bytes(format); byte += 64) _mm_prefetch(a->position + byte, _MM_HINT_T0);
    } else {
        for (int64_t byte = 0; byte < a->step; byte += 64) _mm_prefetch(a->position + byte, _MM_HINT_T1);
    }
    a->position += a->step;
}

/* Sums of up to two tiles of rows and two of outputs. */
typedef struct {
    _Alignas(64) float of[4][MAX_HEIGHT][LANES];
} Sums;

INLINE void zero_sums(const int is_pair) {
    tile_zero(TOP_LEFT);
    tile_zero(TOP_RIGHT);
    if (is_pair) {
        tile_zero(BOTTOM_LEFT);
        tile_zero(BOTTOM_RIGHT);
    }
}

INLINE void read_sums(const int is_pair, Sums *sums) {
    tile_store(TOP_LEFT, sums->of[TOP_LEFT]);
    tile_store(TOP_RIGHT, sums->of[TOP_RIGHT]);
    if (is_pair) {
        tile_store(BOTTOM_LEFT, sums->of[BOTTOM_LEFT]);
        tile_store(BOTTOM_RIGHT, sums->of[BOTTOM_RIGHT]);
    }
}

INLINE void add_block(const uint16_t *top, const uint16_t *bottom, const uint16_t *weights, const int is_pair) {
    tile_load(LEFT, weights);
    tile_load(RIGHT, weights + TILE_VALUES);
    tile_load(TOP, top);
    tile_dot(TOP_LEFT, TOP, LEFT);
    tile_dot(TOP_RIGHT, TOP, RIGHT);
    if (is_pair) {
        tile_load(BOTTOM, bottom);
        tile_dot(BOTTOM_LEFT, BOTTOM, LEFT);
        tile_dot(BOTTOM_RIGHT, BOTTOM, RIGHT);
    }
}

/* A group's sums, times its scales. */
INLINE void add_scaled(const Sums *group, const float *scales, const int is_pair, int64_t height, Sums *sums) {
    for (int t = 0; t < (is_pair ? 4 : 2); t++) {
        const __m512 scale = _mm512_loadu_ps(scales + t % 2 * LANES);
        for (int64_t r = 0; r < height; r++) {
            float *sum = sums->of[t][r];
            _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(group->of[t][r]), scale, _mm512_load_ps(sum)));
        }
    }
}

/* One tile of rows, or two, times a panel. is_pair, is_only and format are constants after inlining. */
TILE_INLINE void multiply(
    const Job *j, int64_t panel, int64_t tile, Ahead *ahead, const int is_pair, const int is_only, const Format format) {
    const Weight *w = j->linear->weight;
    const Blocks *b = &j->blocks;
    const int64_t height = j->rows.height;
    const char *kept = (const char *)w->panels + panel * b->num_blocks * block_bytes(format);
    const float *scales = w->scales + (format >= INT8 ? panel * b->num_groups * BLOCK : 0);
    const uint16_t *top = rows_of_block(&j->rows, b->num_blocks, tile, 0);
    const uint16_t *bottom = rows_of_block(&j->rows, b->num_blocks, tile + 1, 0);
    _Alignas(64) uint16_t widened[WIDENED_BLOCKS][BLOCK_VALUES];
    Sums sums, of_group;
    if (format >= INT8)
        for (int t = 0; t < 4; t++)
            for (int64_t r = 0; r < height; r++) _mm512_store_ps(sums.of[t][r], _mm512_setzero_ps());
    if (format >= INT8)
        for (int64_t block = 0; block < WIDENED_AHEAD && block < b->num_blocks; block++)
            widen_block(kept + block * block_bytes(format), format, widened[block]);
    for (int64_t group = 0, block = 0; group < b->num_groups; group++) {
        zero_sums(is_pair);
        for (int64_t i = 0; i < b->blocks_per_group; i++, block++) {
            const uint16_t *weights = (const uint16_t *)(kept + block * block_bytes(format));
            ask_ahead(ahead, is_only, format);
            if (format >= INT8) {
                const int64_t later = block + WIDENED_AHEAD;
                if (later < b->num_blocks)
                    widen_block(kept + later * block_bytes(format), format, widened[later % WIDENED_BLOCKS]);
                weights = widened[block % WIDENED_BLOCKS];
            }
            add_block(top + block * height * BLOCK, bottom + block * height * BLOCK, weights, is_pair);
        }
        read_sums(is_pair, format >= INT8 ? &of_group : &sums);
        if (format >= INT8) add_scaled(&of_group, scales + group * BLOCK, is_pair, height, &sums);
    }
    for (int t = 0; t < (is_pair ? 4 : 2); t++)
        for (int64_t r = 0; r < height; r++) {
            const int64_t row = (tile + t / 2) * height + r;
            if (row < j->linear->num_rows)
                store_sums(j->linear, row, panel * BLOCK + t % 2 * LANES, _mm512_load_ps(sums.of[t][r]));
        }
}

/* All rows of a panel. */
TILE_INLINE void multiply_panel(const Job *j, int64_t panel, const Format format) {
    const int64_t num_tiles = j->rows.num_tiles, panel_bytes = j->blocks.num_blocks * block_bytes(format);
    const char *kept = (const char *)j->linear->weight->panels + panel * panel_bytes;
    Ahead ahead = ahead_of(kept, panel_bytes, (num_tiles + 1) / 2, format);
    if (num_tiles == 1) {
        multiply(j, panel, 0, &ahead, 0, 1, format);
    } else if (num_tiles == 2) {
        multiply(j, panel, 0, &ahead, 1, 1, format);
    } else {
        for (int64_t tile = 0; tile + 1 < num_tiles; tile += 2) multiply(j, panel, tile, &ahead, 1, 0, format);
        if (num_tiles % 2 == 1) multiply(j, panel, num_tiles - 1, &ahead, 0, 0, format);
    }
}

static TileShapes shapes_of(int64_t height) {
    TileShapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.row_bytes[t] = 64;
        shapes.rows[t] = t == LEFT || t == RIGHT ? 16 : (uint8_t)height;
    }
    return shapes;
}

TILE_TARGET static void share_task(const void *job, int64_t share) {
    const Job *j = job;
    const TileShapes shapes = shapes_of(j->rows.height);
    tile_configure(&shapes); /* once a call */
    for (int64_t panel; (panel = next_of(j->panels, share)) >= 0;) switch ((Format)j->linear->weight->format) {
        case BFLOAT16: multiply_panel(j, panel, BFLOAT16); break;
        case INT8: multiply_panel(j, panel, INT8); break;
        case INT4: multiply_panel(j, panel, INT4); break;
        case FLOAT32: break; /* never laid out for tiles */
    }
    tile_release(); /* else the system would save the tiles at every switch between threads */
}

void LINEAR(const Linear *l, int num_threads) {
    if (l->num_rows == 0) return;
    Shares panels;
    const Job job = {l, round_rows(l, MAX_HEIGHT, num_threads), blocks_of(l->weight), &panels};
    divide(&panels, job.blocks.num_panels, num_threads);
    parallel_for(share_task, &job, panels.num_shares, num_threads);
}

#endif
