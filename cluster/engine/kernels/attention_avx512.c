/*
 * Attention in float32, by AVX-512: chunks of 16 positions. Keys are turned round once a chunk, so that a lane holds one
 * position for all queries of their head.
 */
#include "attention.h"
#include "transpose.h"

#include <math.h>
#include <string.h>

#define CHUNK LANES

/* One head's keys or values at `count` indices, widened; nought beyond. */
INLINE void gather(const Attention *a, const void *cache, const int64_t *indices, int64_t count, float *rows) {
    for (int64_t i = 0; i < CHUNK; i++) {
        float *row = rows + i * a->head_dim;
        if (i >= count) {
            memset(row, 0, (size_t)a->head_dim * sizeof(float));
            continue;
        }
        for (int64_t d = 0; d < a->head_dim; d += LANES)
            _mm512_storeu_ps(row + d, load(cache, indices[i] + d, 0xffff, a->is_bfloat16));
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

/* What a part's queries have seen so far. */
typedef struct {
    const Attention *attention;
    const Part *part;
    int64_t group; /* queries that share a KV head */
    const float **queries;     /* [num_queries] vectors of head_dim */
    const int64_t *positions;  /* of the part's rows; a row sees positions up to its own */
    float *sums;               /* [num_queries, head_dim] */
    float *largest, *totals;   /* [num_queries]: of the scores, and of their exponentials */
    float *rows, *columns;     /* [CHUNK, head_dim], [head_dim, CHUNK]: room for a chunk */
} Progress;

static TARGET void visit(void *progress, int64_t start, const int64_t *path, int64_t first, int64_t end) {
    const Progress *p = progress;
    const Attention *a = p->attention;
    const int64_t head_dim = a->head_dim, seen = p->positions[(end - 1) / p->group] + 1 - start;
    const int64_t count = seen < CHUNK ? seen : CHUNK;
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf((float)head_dim));
    int64_t indices[CHUNK];
    find(a, p->part, start, count, path, indices);
    gather(a, a->keys, indices, count, p->rows);
    for (int64_t d = 0; d < head_dim; d += LANES) transpose(p->rows + d, head_dim, p->columns + d * CHUNK);
    gather(a, a->values, indices, count, p->rows);
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

TARGET static void attend_task(const void *job, int64_t item) {
    const Attention *a = ((const Parts *)job)->attention;
    const Part *part = &((const Parts *)job)->parts[item];
    const int64_t head_dim = a->head_dim, group = group_of(a), num_queries = part->num_rows * group;
    float rows[CHUNK * head_dim], columns[CHUNK * head_dim], sums[num_queries * head_dim];
    float largest[num_queries], totals[num_queries];
    const float *queries[num_queries];
    for (int64_t q = 0; q < num_queries; q++) {
        queries[q] = query_of(a, part, part->first_head, q);
        largest[q] = -INFINITY;
        totals[q] = 0;
    }
    memset(sums, 0, sizeof sums);
    const int64_t *positions = a->positions + first_row_of(a, part);
    Progress progress = {a, part, group, queries, positions, sums, largest, totals, rows, columns};
    walk(a, part, CHUNK, visit, &progress);
    for (int64_t q = 0; q < num_queries; q++) {
        float *y = answer_of(a, part, part->first_head, q);
        for (int64_t d = 0; d < head_dim; d += LANES)
            _mm512_storeu_ps(y + d, _mm512_div_ps(_mm512_loadu_ps(sums + q * head_dim + d), _mm512_set1_ps(totals[q])));
    }
}

void attention_avx512(const Parts *parts, int num_threads) {
    parallel_for(attend_task, parts, parts->count, num_threads);
}
