/*
 * Products in float32, for weights of every format.
 *
 * An output is one lane and one chain of fused multiply-adds over the inputs in their order. Neither the width of a
 * register nor the division into tiles and blocks changes its bits: partial sums are stored and loaded exactly.
 * Integers are summed by group of inputs, and a group's sum times its scale is added to the output.
 *
 * Weights lie in panels of 64 outputs, in the order in which they are used: one stream from memory. oneDNN lays weights
 * out again at every call unless they are packed. The 64 weights of one input (of two, in INT4), where o counts outputs:
 *   FLOAT32, INT8   in the order of o
 *   BFLOAT16        32-bit words, of outputs o (low half) and o + 16 (high), for o in 0..15, then for o in 32..47
 *   INT4            32-bit words, for o in 0..15: nibbles of outputs o, o + 16, o + 32, o + 48 for the first input,
 *                   then for the second
 */
#define PANEL 64      /* outputs whose weights lie together */
/* Size of a block's weights, which all rows use before those of the next block: they stay in the L1 cache. */
#define BLOCK_BYTES 16384
#define MAX_GROUP 48  /* rows that use a block, one tile after the other */
#define MAX_ROWS 6    /* of a tile: its sums stay in registers */
/* Distance of prefetches where one tile has all rows: the prefetching of processors leaves memory idle. */
#define AHEAD_BYTES 4096
#define WIDE_DEPTH (BLOCK_BYTES / (4 * PANEL)) /* inputs of a block that is widened */

/* A tile has pairs of registers, for outputs o and o + 16 like the words of BFLOAT16: those that fit into the registers. */
#define PAIRS (PANEL / WIDTH / 2) /* of a panel */
#if WIDTH == 16
#define PAIRS_OF(rows) 2
#elif WIDTH == 8
#define PAIRS_OF(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#else
#define PAIRS_OF(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#endif

INLINE int64_t bytes_per_input(const Format format) {
    return format == FLOAT32 ? 4 * PANEL : format == BFLOAT16 ? 2 * PANEL : format == INT8 ? PANEL : PANEL / 2;
}

INLINE int64_t first_output(const int64_t pair) { return pair * WIDTH / LANES * 2 * LANES + pair * WIDTH % LANES; }

/* Loads the weights of one pair and input. `parity`: the input modulo 2, for INT4. */
INLINE void load_pair(
    const char *panel, int64_t input, const int parity, const int64_t pair, const Format format, Floats *weights) {
    const char *inputs = panel + input * bytes_per_input(format);
    const int64_t o = first_output(pair);
    if (format == FLOAT32) {
        weights[0] = load_floats((const float *)inputs + o);
        weights[1] = load_floats((const float *)inputs + o + LANES);
    } else if (format == BFLOAT16) {
        const Ints words = *((const LooseInts *)inputs + pair);
        weights[0] = (Floats)(words << 16);
        weights[1] = (Floats)(words & (int32_t)0xffff0000);
    } else if (format == INT8) {
        weights[0] = widen_bytes((const int8_t *)inputs + o);
        weights[1] = widen_bytes((const int8_t *)inputs + o + LANES);
    } else {
        const Ints words = *((const LooseInts *)(inputs - parity * bytes_per_input(format)) + pair % (LANES / WIDTH));
        const int shift = (int)(16 * parity + o / (2 * LANES) * 8); /* of the nibble for output o */
        weights[0] = __builtin_convertvector((words << (28 - shift)) >> 28, Floats);
        weights[1] = __builtin_convertvector((words << (24 - shift)) >> 28, Floats);
    }
}

/* A range of a panel's inputs; for integers within one group. */
typedef struct {
    const char *panel;
    int64_t first, end;  /* inputs */
    const float *scales; /* of integers, if the block is the last of its group; else NULL */
    int begins;          /* true for integers if the block is the first of its group */
    int is_stream;       /* true if one tile has all rows, so that each weight is loaded once */
} Block;

/* Sums of a block's rows. For integers, `sums` has the current group, and `totals` the scaled sums of finished groups. */
typedef struct {
    float sums[MAX_GROUP][PANEL], totals[MAX_GROUP][PANEL];
} Results;

/*
 * Adds products to `rows` rows and `pairs` pairs from `first_pair`; for every input prefetches `step` bytes from `ahead`.
 * rows, pairs, step and format are constants after inlining.
 */
INLINE void add_tile(const Block *block, const float *x, int64_t x_stride, Results *results, int64_t row,
                     const int64_t first_pair, const int rows, const int pairs, const char *ahead, const int64_t step,
                     const Format format) {
    Floats of[MAX_ROWS][2 * PAIRS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2 * pairs; v++) {
            const int64_t o = first_output(first_pair + v / 2) + v % 2 * LANES;
            of[r][v] = block->begins ? all_of(0) : load_floats(results->sums[row + r] + o);
        }
    const int inputs = format == INT4 ? 2 : 1; /* that lie in the same words */
    for (int64_t i = block->first; i < block->end; i += inputs, ahead += step * inputs) {
        UNROLL for (int64_t byte = 0; byte < step * inputs; byte += 64) {
            if (rows <= 2 || block->is_stream) __builtin_prefetch(ahead + byte, 0, 3);
            else __builtin_prefetch(ahead + byte, 0, 2); /* in L1 it would displace the block in use */
        }
        UNROLL for (int k = 0; k < inputs; k++)
            UNROLL for (int p = 0; p < pairs; p++) {
                Floats weights[2];
                load_pair(block->panel, i + k, k, first_pair + p, format, weights);
                UNROLL for (int r = 0; r < rows; r++) {
                    const Floats input = all_of(x[r * x_stride + i + k]);
                    of[r][2 * p] = fma_of(input, weights[0], of[r][2 * p]);
                    of[r][2 * p + 1] = fma_of(input, weights[1], of[r][2 * p + 1]);
                }
            }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int v = 0; v < 2 * pairs; v++) {
            const int64_t o = first_output(first_pair + v / 2) + v % 2 * LANES;
            float *total = results->totals[row + r] + o;
            if (block->scales == NULL) store_floats(results->sums[row + r] + o, of[r][v]);
            else store_floats(total, fma_of(of[r][v], load_floats(block->scales + o), load_floats(total)));
        }
}

/* Adds a block's products to all rows, in tiles of nearly equal height, and prefetches from `ahead`. */
INLINE void add_block(const Block *block, const float *x, int64_t x_stride, Results *results, int64_t num_rows,
                      const char *ahead, const Format format) {
    const int64_t num_tiles = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t tile = 0; tile < num_tiles; tile++) {
        const int64_t row = num_rows * tile / num_tiles, height = num_rows * (tile + 1) / num_tiles - row;
        switch (height) {
#define CASE(rows) \
    case rows: \
        for (int64_t p = 0; p < PAIRS; p += PAIRS_OF(rows)) { \
            const int64_t step = bytes_per_input(format) * PAIRS_OF(rows) / PAIRS; \
            add_tile(block, x + row * x_stride, x_stride, results, row, p, rows, PAIRS_OF(rows), \
                     ahead + p / PAIRS_OF(rows) * (block->end - block->first) * step, step, format); \
        } \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
        }
    }
}

static TARGET void add_block_of_floats(const Block *block, const float *x, int64_t x_stride, Results *results,
                                       int64_t num_rows, const char *ahead) {
    add_block(block, x, x_stride, results, num_rows, ahead, FLOAT32);
}

/* The weights of a block as floats, [inputs, PANEL]: integers take long to widen, once for all rows. */
INLINE void widen_block(const Block *block, float *weights, const Format format) {
    const int inputs = format == INT4 ? 2 : 1;
    for (int64_t i = block->first; i < block->end; i += inputs)
        UNROLL for (int k = 0; k < inputs; k++, weights += PANEL)
            UNROLL for (int64_t p = 0; p < PAIRS; p++) {
                Floats pair[2];
                load_pair(block->panel, i + k, k, p, format, pair);
                store_floats(weights + first_output(p), pair[0]);
                store_floats(weights + first_output(p) + LANES, pair[1]);
            }
}

INLINE void store_sums(const Linear *l, int64_t row, int64_t out, const float *sums) {
    const Weight *w = l->weight;
    for (int64_t o = 0; o < PANEL && out + o < w->out_features; o += LANES) {
        const int64_t count = w->out_features - out - o;
        Vector sum = load(sums + o);
        if (w->bias != NULL) sum = add(sum, load_first(w->bias + out + o, count));
        store_first(l->y + row * w->out_features + out + o, count, sum);
    }
}

/* `num_rows` rows from `first_row` times one panel. */
INLINE void multiply_panel(const Linear *l, int64_t panel, int64_t first_row, int64_t num_rows, const Format format) {
    const Weight *w = l->weight;
    const int64_t n = w->in_features, size = format >= INT8 ? w->group_size : n;
    const int is_widened = format >= INT8 && num_rows > MAX_ROWS;
    const int is_stream = num_rows <= MAX_ROWS && PAIRS_OF(num_rows) == PAIRS;
    const int64_t depth = is_stream ? size : is_widened ? WIDE_DEPTH : BLOCK_BYTES / bytes_per_input(format);
    const float *x = l->x + first_row * n, *scales = w->scales + (format >= INT8 ? panel * (n / size) * PANEL : 0);
    _Alignas(64) float weights[WIDE_DEPTH * PANEL];
    _Alignas(64) Results results;
    memset(format >= INT8 ? results.totals : results.sums, 0, (size_t)num_rows * sizeof results.sums[0]);
    Block block = {.panel = (const char *)w->panels + panel * n * bytes_per_input(format), .is_stream = is_stream};
    for (int64_t group_end = size; block.first < n; block.first = block.end) {
        block.end = block.first + depth < group_end ? block.first + depth : group_end;
        if (format >= INT8) {
            block.begins = block.first == group_end - size;
            block.scales = block.end == group_end ? scales : NULL;
        }
        const char *next = block.panel + bytes_per_input(format) * (is_stream ? block.first : block.end);
        if (is_widened) {
            widen_block(&block, weights, format);
            const Block widened = {(const char *)weights, 0, block.end - block.first, block.scales, block.begins, 0};
            add_block_of_floats(&widened, x + block.first, n, &results, num_rows, next);
        } else {
            add_block(&block, x, n, &results, num_rows, is_stream ? next + AHEAD_BYTES : next, format);
        }
        if (block.end == group_end) group_end += size, scales += PANEL;
    }
    for (int64_t row = 0; row < num_rows; row++)
        store_sums(l, first_row + row, panel * PANEL, format >= INT8 ? results.totals[row] : results.sums[row]);
}

/* A function for each format: compilers take much longer over all of them in one. */
#define OF_FORMAT(name, format) \
    static TARGET void name(const Linear *l, int64_t panel) { \
        for (int64_t row = 0; row < l->num_rows; row += MAX_GROUP) \
            multiply_panel(l, panel, row, l->num_rows - row < MAX_GROUP ? l->num_rows - row : MAX_GROUP, format); \
    }
OF_FORMAT(multiply_floats, FLOAT32)
OF_FORMAT(multiply_halves, BFLOAT16)
OF_FORMAT(multiply_bytes, INT8)
OF_FORMAT(multiply_nibbles, INT4)
#undef OF_FORMAT

typedef struct {
    const Linear *linear;
    Shares *panels;
} Job;

static void multiply_share(const void *job, int64_t share) {
    static void (*const of_format[])(const Linear *, int64_t) = {
        multiply_floats, multiply_halves, multiply_bytes, multiply_nibbles};
    const Job *j = job;
    for (int64_t panel; (panel = next_of(j->panels, share)) >= 0;) of_format[j->linear->weight->format](j->linear, panel);
}

static void linear_portable(const Linear *l, int num_threads) {
    Shares panels;
    const Job job = {l, &panels};
    divide(&panels, (l->weight->out_features + PANEL - 1) / PANEL, num_threads);
    parallel_for(multiply_share, &job, panels.num_shares, num_threads);
}
