/*
 * Causal attention over the paged KV cache, with the softmax made on the way (Milakov, Gimelshein, "Online
 * normalizer calculation for softmax", arXiv 1805.02867).
 *
 * A context is read in chunks of positions counted from its beginning, and a row passes over those that lie after it:
 * its result does not depend on the other rows of its segment, so prefill, verify and decode agree to the bit.
 * A row of a tree attends to the chain of its ancestors, gathered in the order of their positions: to the bit what
 * that chain alone would give. With a sliding window, a row also passes over the chunks before its window.
 */
#include "attention.h"

#include <stdlib.h>

/* Queries of a part: their sums stay in the L2 cache. */
#define MAX_QUERIES_OF_TILES 128
#define MAX_QUERIES_OF_LANES 64
#define PARTS_A_THREAD 4 /* at least, so that threads end at the same time, about */

/* How an attention is cut into parts. */
typedef struct {
    int64_t rows, heads;
} Cut;

static int64_t count_parts(const Attention *a, Cut cut) {
    int64_t count = 0;
    for (int64_t s = 0; s < a->num_segments; s++)
        count += (a->row_starts[s + 1] - a->row_starts[s] + cut.rows - 1) / cut.rows;
    return count * (a->num_kv_heads / cut.heads);
}

/*
 * Chooses the size of parts. With more rows a context is read fewer times. Keys and values of neighbouring heads lie next
 * to each other, so they are read faster together. A part has at most `max_queries` of all its heads.
 */
static Cut choose_cut(const Attention *a, int64_t max_rows, int64_t max_queries, int num_threads) {
    const int64_t group = group_of(a), least = num_threads * PARTS_A_THREAD;
    const int64_t most = group < max_queries ? max_queries / group : 1;
    Cut cut = {max_rows < most ? max_rows : most, 1};
    while (cut.rows * group > 32 && cut.rows > 1 && count_parts(a, cut) < least) cut.rows = (cut.rows + 1) / 2;
    for (;;) {
        const Cut wider = {cut.rows, cut.heads * 2};
        if (a->num_kv_heads % wider.heads != 0 || wider.rows * group * wider.heads > max_queries) return cut;
        if (count_parts(a, wider) < least) return cut;
        cut = wider;
    }
}

int attention(const Attention *a, int num_threads) {
    const int has_tiles = a->is_bfloat16 && (a->instruction_set == AMX || a->instruction_set == AMX_EMULATED);
    int64_t max_rows = 1;
    for (int64_t s = 0; s < a->num_segments; s++) {
        const int64_t rows = a->row_starts[s + 1] - a->row_starts[s];
        if (rows > max_rows) max_rows = rows;
    }
    const Cut cut = choose_cut(a, max_rows, has_tiles ? MAX_QUERIES_OF_TILES : MAX_QUERIES_OF_LANES, num_threads);
    const int64_t count = count_parts(a, cut);
    Part *parts = malloc((size_t)count * sizeof(Part)), *next = parts;
    if (parts == NULL) return -1;
    for (int64_t s = 0; s < a->num_segments; s++) {
        const int64_t rows = a->row_starts[s + 1] - a->row_starts[s];
        for (int64_t row = 0; row < rows; row += cut.rows)
            for (int64_t head = 0; head < a->num_kv_heads; head += cut.heads)
                *next++ = (Part){s, row, rows - row < cut.rows ? rows - row : cut.rows, head, cut.heads};
    }
    const Parts job = {a, parts, count, (max_rows < cut.rows ? max_rows : cut.rows) * group_of(a)};
    if (!has_tiles) portable->attention(&job, num_threads);
#if defined(__x86_64__)
    else if (a->instruction_set == AMX_EMULATED) attention_amx_emulated(&job, num_threads);
#endif
#if KNOWS_AMX
    else attention_amx(&job, num_threads);
#endif
    free(parts);
    return 0;
}
