/*
 * Causal attention over the paged KV cache, with the softmax made on the way (Milakov, Gimelshein, "Online
 * normalizer calculation for softmax", arXiv 1805.02867).
 *
 * A context is read in chunks of 16 positions counted from its beginning, and a row passes over those that lie
 * after it: its result does not depend on the other rows of its segment, so prefill, verify and decode agree to
 * the bit. Keys are turned round once a chunk, so that a lane holds one position for all queries of their head.
 * A row of a tree attends to the chain of its ancestors, gathered in the order of their positions: to the bit what
 * that chain alone would give.
 * With a sliding window, a row also passes over the chunks before its window.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define QUERIES 16 /* that share the keys and values of one head, about */
#define CHUNK LANES

/* One task: neighbouring rows of a segment at one KV head. */
typedef struct {
    int64_t segment, first_row, num_rows, kv_head;
} Tile;

typedef struct {
    const Attention *attention;
    const Tile *tiles;
} Job;

/* 16 columns of 16 rows, transposed: a lane of columns[c] is a row. */
INLINE void transpose(const float *rows, int64_t stride, float *columns) {
    __m512 a[16], b[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(rows + i * stride);
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    /* a[4g + c] becomes, in its 128-bit lane L, rows 4g to 4g + 3 of column 4L + c. */
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
        a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xee);
        a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
        a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512 top_even = _mm512_shuffle_f32x4(a[c], a[c + 4], 0x88);
        __m512 top_odd = _mm512_shuffle_f32x4(a[c], a[c + 4], 0xdd);
        __m512 bottom_even = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0x88);
        __m512 bottom_odd = _mm512_shuffle_f32x4(a[c + 8], a[c + 12], 0xdd);
        _mm512_storeu_ps(columns + c * CHUNK, _mm512_shuffle_f32x4(top_even, bottom_even, 0x88));
        _mm512_storeu_ps(columns + (c + 4) * CHUNK, _mm512_shuffle_f32x4(top_odd, bottom_odd, 0x88));
        _mm512_storeu_ps(columns + (c + 8) * CHUNK, _mm512_shuffle_f32x4(top_even, bottom_even, 0xdd));
        _mm512_storeu_ps(columns + (c + 12) * CHUNK, _mm512_shuffle_f32x4(top_odd, bottom_odd, 0xdd));
    }
}

/*
 * One head's keys or values of the `count` positions from `start`, widened; nought beyond. In a tree the positions
 * from `base` on are those of `path`, which says which node of the tree each of them is.
 */
INLINE void gather(const Attention *a, const Tile *t, const void *cache, int64_t start, int64_t count, int64_t base,
                   const int64_t *path, float *rows) {
    const int64_t *table = a->block_tables + t->segment * a->table_len;
    for (int64_t i = 0; i < CHUNK; i++) {
        float *row = rows + i * a->head_dim;
        if (i >= count) {
            memset(row, 0, (size_t)a->head_dim * sizeof(float));
            continue;
        }
        int64_t place = start + i;
        if (path != NULL && place >= base) place = base + path[place - base];
        int64_t slot = table[place / a->block_size] * a->block_size + place % a->block_size;
        int64_t index = (slot * a->num_kv_heads + t->kv_head) * a->head_dim;
        for (int64_t d = 0; d < a->head_dim; d += LANES)
            _mm512_storeu_ps(row + d, load(cache, index + d, 0xffff, a->is_bfloat16));
    }
}

/* Scores of a chunk for `count` (a constant) queries: their sums run beside each other. */
INLINE void score(const float *const *queries, const float *columns, int64_t head_dim, const int count, __m512 *out) {
    __m512 sums[4];
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) sums[q] = _mm512_setzero_ps();
    for (int64_t d = 0; d < head_dim; d++) {
        __m512 column = _mm512_loadu_ps(columns + d * CHUNK);
#pragma GCC unroll 4
        for (int q = 0; q < count; q++)
            sums[q] = _mm512_fmadd_ps(_mm512_set1_ps(queries[q][d]), column, sums[q]);
    }
#pragma GCC unroll 4
    for (int q = 0; q < count; q++) out[q] = sums[q];
}

/* sums = sums * scale + weights . values, 16 dimensions at a time. */
INLINE void accumulate(float *sums, float scale, const float *weights, const float *values, int64_t head_dim) {
    for (int64_t d = 0; d < head_dim; d += 2 * LANES) {
        const int is_pair = d + LANES < head_dim;
        const int64_t other = is_pair ? d + LANES : d;
        __m512 first = _mm512_mul_ps(_mm512_loadu_ps(sums + d), _mm512_set1_ps(scale));
        __m512 second = _mm512_mul_ps(_mm512_loadu_ps(sums + other), _mm512_set1_ps(scale));
        for (int i = 0; i < CHUNK; i++) {
            __m512 weight = _mm512_set1_ps(weights[i]);
            first = _mm512_fmadd_ps(weight, _mm512_loadu_ps(values + i * head_dim + d), first);
            second = _mm512_fmadd_ps(weight, _mm512_loadu_ps(values + i * head_dim + other), second);
        }
        _mm512_storeu_ps(sums + d, first);
        if (is_pair) _mm512_storeu_ps(sums + other, second);
    }
}

/* What a tile's queries have seen so far. */
typedef struct {
    int64_t group; /* queries that share a KV head */
    const float **queries;     /* [num_queries] vectors of head_dim */
    const int64_t *positions;  /* of the tile's rows; a row sees positions up to its own */
    float *sums;               /* [num_queries, head_dim] */
    float *largest, *totals;   /* [num_queries]: of the scores, and of their exponentials */
    float *rows, *columns;     /* [CHUNK, head_dim], [head_dim, CHUNK]: room for a chunk */
} Progress;

/* Queries `first` to `end` attend to what they see of the chunk at `start`. */
INLINE void attend_to_chunk(const Attention *a, const Tile *t, const Progress *p, int64_t start, int64_t base,
                            const int64_t *path, int64_t first, int64_t end) {
    const int64_t head_dim = a->head_dim, seen = p->positions[(end - 1) / p->group] + 1 - start;
    const int64_t count = seen < CHUNK ? seen : CHUNK;
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf((float)head_dim));
    gather(a, t, a->keys, start, count, base, path, p->rows);
    for (int64_t d = 0; d < head_dim; d += LANES) transpose(p->rows + d, head_dim, p->columns + d * CHUNK);
    gather(a, t, a->values, start, count, base, path, p->rows);
    __m512 scores[4];
    for (int64_t q = first; q < end; q++) {
        const int64_t ahead = (q - first) % 4;
        if (ahead == 0) {
            if (end - q >= 4) score(p->queries + q, p->columns, head_dim, 4, scores);
            else if (end - q == 3) score(p->queries + q, p->columns, head_dim, 3, scores);
            else if (end - q == 2) score(p->queries + q, p->columns, head_dim, 2, scores);
            else score(p->queries + q, p->columns, head_dim, 1, scores);
        }
        const int64_t last = p->positions[q / p->group] + 1 - start, before = last - a->span;
        const __mmask16 visible = first_lanes(last) & ~first_lanes(before > 0 ? before : 0);
        if (visible == 0) continue;
        const __m512 scaled = _mm512_mul_ps(scores[ahead], scale);
        const float most = _mm512_mask_reduce_max_ps(visible, scaled);
        const float next = most > p->largest[q] ? most : p->largest[q];
        const __m512 weights = _mm512_maskz_mov_ps(visible, exp_ps(_mm512_sub_ps(scaled, _mm512_set1_ps(next))));
        const float rescale = _mm512_cvtss_f32(exp_ps(_mm512_set1_ps(p->largest[q] - next)));
        float spread[CHUNK];
        _mm512_storeu_ps(spread, weights);
        p->largest[q] = next;
        p->totals[q] = p->totals[q] * rescale + _mm512_reduce_add_ps(weights);
        accumulate(p->sums + q * head_dim, rescale, spread, p->rows, head_dim);
    }
}

TARGET static void attend(const Attention *a, const Tile *t) {
    const int64_t head_dim = a->head_dim, group = a->num_heads / a->num_kv_heads;
    const int64_t num_queries = t->num_rows * group;
    const int64_t row_size = (a->num_heads + 2 * a->num_kv_heads) * head_dim;
    const int64_t segment_start = a->row_starts[t->segment], first_row = segment_start + t->first_row;
    float rows[CHUNK * head_dim], columns[CHUNK * head_dim], sums[num_queries * head_dim];
    float largest[num_queries], totals[num_queries];
    const float *queries[num_queries];
    for (int64_t q = 0; q < num_queries; q++) {
        queries[q] = a->qkv + (first_row + q / group) * row_size + (t->kv_head * group + q % group) * head_dim;
        largest[q] = -INFINITY;
        totals[q] = 0;
    }
    memset(sums, 0, sizeof sums);
    const int64_t *positions = a->positions + first_row;
    const Progress p = {group, queries, positions, sums, largest, totals, rows, columns};
    /* Everything before the segment's own tokens is seen by all of its rows, as far as their window reaches. */
    const int64_t base = a->prefix_lens[t->segment];
    const int64_t *paths = a->paths == NULL ? NULL : a->paths + first_row * a->path_len;
    const int is_tree = paths != NULL && paths[0] >= 0;
    const int64_t first_position = is_tree ? base : positions[0]; /* a tree's rows are not in the order of positions */
    const int64_t first_seen = first_position >= a->span ? first_position - a->span + 1 : 0;
    if (!is_tree) {
        for (int64_t start = first_seen / CHUNK * CHUNK; start <= positions[t->num_rows - 1]; start += CHUNK) {
            int64_t row = start - positions[0]; /* the first that reaches into this chunk */
            attend_to_chunk(a, t, &p, start, base, NULL, row > 0 ? row * group : 0, num_queries);
        }
    } else {
        const int64_t first = first_seen / CHUNK * CHUNK, shared = base / CHUNK * CHUNK;
        for (int64_t start = first; start < shared; start += CHUNK)
            attend_to_chunk(a, t, &p, start, base, NULL, 0, num_queries);
        for (int64_t row = 0; row < t->num_rows; row++)
            for (int64_t start = shared > first ? shared : first; start <= positions[row]; start += CHUNK)
                attend_to_chunk(a, t, &p, start, base, paths + row * a->path_len, row * group, (row + 1) * group);
    }
    for (int64_t q = 0; q < num_queries; q++) {
        float *y = a->y + (first_row + q / group) * a->num_heads * head_dim +
                   (t->kv_head * group + q % group) * head_dim;
        for (int64_t d = 0; d < head_dim; d += LANES)
            _mm512_storeu_ps(y + d, _mm512_div_ps(_mm512_loadu_ps(sums + q * head_dim + d), _mm512_set1_ps(totals[q])));
    }
}

static void attend_task(const void *job, int64_t item) {
    const Job *j = job;
    attend(j->attention, &j->tiles[item]);
}

int attention(const Attention *a, int num_threads) {
    const int64_t group = a->num_heads / a->num_kv_heads;
    const int64_t tile_rows = group < QUERIES ? QUERIES / group : 1;
    const int64_t num_rows = a->row_starts[a->num_segments];
    Tile *tiles = malloc((size_t)((num_rows / tile_rows + a->num_segments) * a->num_kv_heads) * sizeof(Tile));
    if (tiles == NULL) return -1;
    int64_t count = 0;
    for (int64_t s = 0; s < a->num_segments; s++) {
        const int64_t rows = a->row_starts[s + 1] - a->row_starts[s];
        for (int64_t row = 0; row < rows; row += tile_rows)
            for (int64_t head = 0; head < a->num_kv_heads; head++)
                tiles[count++] = (Tile){s, row, rows - row < tile_rows ? rows - row : tile_rows, head};
    }
    const Job job = {a, tiles};
    parallel_for(attend_task, &job, count, num_threads);
    free(tiles);
    return 0;
}
