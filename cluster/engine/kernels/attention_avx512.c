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

/* One head's keys at `count` indices, a lane for each, dimension by dimension; what lanes beyond have is not to be
   looked at. */
INLINE void gather_columns(const Attention *a, const int64_t *indices, int64_t count, float *rows, float *columns) {
    if (!a->is_bfloat16 || a->head_dim % (2 * LANES) != 0) {
        gather(a, a->keys, indices, count, rows);
        for (int64_t d = 0; d < a->head_dim; d += LANES) transpose(rows + d, a->head_dim, columns + d * CHUNK);
        return;
    }
    /* Two dimensions are turned round as one number, and are apart then: half of the work. */
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000);
    for (int64_t d = 0; d < a->head_dim; d += 2 * LANES) {
        __m512 pairs[CHUNK];
#pragma GCC unroll 16
        for (int64_t i = 0; i < CHUNK; i++)
            pairs[i] = _mm512_loadu_ps((const uint16_t *)a->keys + indices[i < count ? i : count - 1] + d);
        turn_round(pairs);
#pragma GCC unroll 16
        for (int64_t c = 0; c < LANES; c++) {
            const __m512i pair = _mm512_castps_si512(pairs[c]);
            _mm512_storeu_si512(columns + (d + 2 * c) * CHUNK, _mm512_slli_epi32(pair, 16));
            _mm512_storeu_si512(columns + (d + 2 * c + 1) * CHUNK, _mm512_and_si512(pair, upper));
        }
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

/* What up to four queries take from a chunk. */
typedef struct {
    float *sums[4], scales[4], weights[4][CHUNK];
} Taken;

/* sums = sums * scale + weights . values for `count` (a constant) queries, 16 dimensions at a time: their sums run beside
   each other. */
INLINE void accumulate(const Taken *s, const float *values, int64_t head_dim, const int count) {
    for (int64_t d = 0; d < head_dim; d += 2 * LANES) {
        const int is_pair = d + LANES < head_dim;
        const int64_t other = is_pair ? d + LANES : d;
        __m512 first[4], second[4];
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) {
            first[q] = _mm512_mul_ps(_mm512_loadu_ps(s->sums[q] + d), _mm512_set1_ps(s->scales[q]));
            second[q] = _mm512_mul_ps(_mm512_loadu_ps(s->sums[q] + other), _mm512_set1_ps(s->scales[q]));
        }
        for (int i = 0; i < CHUNK; i++) {
            const __m512 value = _mm512_loadu_ps(values + i * head_dim + d);
            const __m512 next = _mm512_loadu_ps(values + i * head_dim + other);
#pragma GCC unroll 4
            for (int q = 0; q < count; q++) {
                const __m512 weight = _mm512_set1_ps(s->weights[q][i]);
                first[q] = _mm512_fmadd_ps(weight, value, first[q]);
                second[q] = _mm512_fmadd_ps(weight, next, second[q]);
            }
        }
#pragma GCC unroll 4
        for (int q = 0; q < count; q++) {
            _mm512_storeu_ps(s->sums[q] + d, first[q]);
            if (is_pair) _mm512_storeu_ps(s->sums[q] + other, second[q]);
        }
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
    gather_columns(a, indices, count, p->rows, p->columns);
    gather(a, a->values, indices, count, p->rows);
    for (int64_t q = first; q < end; q += 4) {
        const int64_t num_queries = end - q < 4 ? end - q : 4;
        __m512 scores[4];
        switch (num_queries) {
            case 1: score(p->queries + q, p->columns, head_dim, 1, scores); break;
            case 2: score(p->queries + q, p->columns, head_dim, 2, scores); break;
            case 3: score(p->queries + q, p->columns, head_dim, 3, scores); break;
            default: score(p->queries + q, p->columns, head_dim, 4, scores);
        }
        Taken seeing; /* those that see some of the chunk */
        int num_seeing = 0;
        for (int64_t i = 0; i < num_queries; i++) {
            const int64_t query = q + i;
            const int64_t last = p->positions[query / p->group] + 1 - start, before = last - a->span;
            const __mmask16 visible = first_lanes(last) & ~first_lanes(before > 0 ? before : 0);
            if (visible == 0) continue;
            const __m512 scaled = _mm512_mul_ps(scores[i], scale);
            const float most = _mm512_mask_reduce_max_ps(visible, scaled);
            const float next = most > p->largest[query] ? most : p->largest[query];
            const __m512 weights = _mm512_maskz_mov_ps(visible, exp_ps(_mm512_sub_ps(scaled, _mm512_set1_ps(next))));
            const float rescale = _mm512_cvtss_f32(exp_ps(_mm512_set1_ps(p->largest[query] - next)));
            p->largest[query] = next;
            p->totals[query] = fmaf(p->totals[query], rescale, _mm512_reduce_add_ps(weights));
            seeing.sums[num_seeing] = p->sums + query * head_dim;
            seeing.scales[num_seeing] = rescale;
            _mm512_storeu_ps(seeing.weights[num_seeing++], weights);
        }
        switch (num_seeing) {
            case 0: break;
            case 1: accumulate(&seeing, p->rows, head_dim, 1); break;
            case 2: accumulate(&seeing, p->rows, head_dim, 2); break;
            case 3: accumulate(&seeing, p->rows, head_dim, 3); break;
            default: accumulate(&seeing, p->rows, head_dim, 4);
        }
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
