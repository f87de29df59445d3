/*
 * Attention by tiles: 32 positions of a context for up to 32 queries at once, their KV cache being in bfloat16.
 *
 * Scores are made turned round, keys times queries, so that a lane holds one query: keys go into tiles as the cache has
 * them, and the softmax of 16 queries is made without sums across lanes. Queries and the softmax's weights are rounded
 * to bfloat16, and the rounded weights are what a sum of values is divided by. A query's bits depend on no other's.
 *
 * Compiled a second time by attention_amx_emulated.c.
 */
#include "instruction_sets.h"

#if KNOWS_AMX || defined(EMULATE_TILES)

#include <math.h>
#include <string.h>

#include "attention.h"
#include "tiles.h"
#include "transpose.h"

#ifdef EMULATE_TILES
#define ATTENTION attention_amx_emulated
#else
#define ATTENTION attention_amx
#endif

#define CHUNK 32              /* positions: the inputs of a product of tiles */
#define FEW 4                 /* up to this number of queries each is computed by itself: 16 together take the time of six */
#define INPUTS 32             /* of a product of tiles */
#define TILE (16 * INPUTS)    /* numbers in a tile of bfloat16 */
/* Numbers of tiles. The first ones have 16 rows, keys or pairs of inputs; the last ones have a row a query. */
#define SCORES 0
#define MORE_SCORES 1
#define KEYS 2
#define MORE_KEYS 3
#define QUERIES 4
#define VALUES 2
#define MORE_VALUES 3
#define WEIGHTS 5
#define SUMS 6
#define MORE_SUMS 7

/* Where a chunk's positions are in the cache, as `find` has them. */
typedef struct {
    int64_t start, count;
    int64_t indices[CHUNK];
} Chunk;

/* What a part's queries have seen so far. There are `num_columns` columns of 16 queries for each of the part's heads. */
typedef struct {
    const Attention *attention;
    const Part *part;
    int64_t num_columns, max_position;
    int64_t size;             /* head_dim, in whole tiles */
    __m512 scale;             /* of scores */
    const int32_t *positions; /* [num_columns * 16], of each query */
    const uint16_t *queries;  /* [heads, num_columns, size / 32] tiles: pairs of inputs, queries */
    uint16_t *keys;           /* [size / 32, 2] tiles: positions, inputs; where they cannot be read in place */
    uint16_t *values;         /* [size / 16] tiles: pairs of positions, dimensions */
    float *sums;              /* [heads, num_columns * 16, size], dimensions in the order that `values` has */
    float *largest, *totals;  /* [heads, num_columns * 16]: of the scores, and of their exponentials */
    Chunk ahead;              /* what was asked for last */
} Progress;

/* Rounded to bfloat16, in the upper halves. */
INLINE __m512i rounded(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    return _mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000));
}

/* 16 numbers in upper halves, paired with 16 others. */
INLINE __m512i paired(__m512i even, __m512i odd) { return _mm512_or_si512(_mm512_srli_epi32(even, 16), odd); }

/* Copies into tiles of pairs of inputs by queries, the right operand of the product. */
INLINE void lay_out_queries(const Attention *a, const Part *p, int64_t head, int64_t num_queries, int64_t size,
                            uint16_t *tiles) {
    for (int64_t q = 0; q < num_queries; q++) {
        const float *query = query_of(a, p, head, q);
        uint16_t *column = tiles + q / 16 * 16 * size;
        for (int64_t d = 0; d < a->head_dim; d += LANES) {
            uint16_t halves[LANES];
            store_halves(halves, _mm512_loadu_ps(query + d));
            uint16_t *pairs = column + d / INPUTS * TILE + d % INPUTS / 2 * 32 + q % 16 * 2;
            for (int i = 0; i < LANES; i += 2) memcpy(pairs + 16 * i, halves + i, 2 * sizeof(uint16_t));
        }
    }
}

/* Keys of the part's head number `head`; nought beyond the chunk's count. */
INLINE void gather_keys(const Progress *p, int64_t head, const Chunk *chunk) {
    const Attention *a = p->attention;
    const uint16_t *keys = (const uint16_t *)a->keys + head * a->head_dim;
    for (int64_t i = 0; i < CHUNK; i++) {
        const __mmask32 is_there = i < chunk->count ? 0xffffffff : 0;
        for (int64_t d = 0; d < p->size; d += INPUTS) {
            const __mmask32 inside = is_there & (a->head_dim - d >= INPUTS ? 0xffffffff : 0xffff);
            const __m512i key = _mm512_maskz_loadu_epi16(inside, keys + (is_there ? chunk->indices[i] : 0) + d);
            _mm512_storeu_si512(p->keys + d / INPUTS * 2 * TILE + i * INPUTS, key);
        }
    }
}

/*
 * Values of the part's head number `head`, nought beyond the chunk's count: no number times what may lie there is.
 * Of 32 dimensions a tile has the lower halves of all eights, and the next the upper ones, as the processor pairs them.
 */
INLINE void gather_values(const Progress *p, int64_t head, const Chunk *chunk) {
    const Attention *a = p->attention;
    const uint16_t *values = (const uint16_t *)a->values + head * a->head_dim;
    for (int64_t i = 0; i < CHUNK; i += 2) {
        const __mmask32 has_even = i < chunk->count ? 0xffffffff : 0, has_odd = i + 1 < chunk->count ? 0xffffffff : 0;
        const int64_t even = has_even ? chunk->indices[i] : 0, odd = has_odd ? chunk->indices[i + 1] : 0;
        for (int64_t d = 0; d < p->size; d += INPUTS) {
            const __mmask32 inside = a->head_dim - d >= INPUTS ? 0xffffffff : 0xffff;
            const __m512i first = _mm512_maskz_loadu_epi16(has_even & inside, values + even + d);
            const __m512i second = _mm512_maskz_loadu_epi16(has_odd & inside, values + odd + d);
            uint16_t *to = p->values + d / INPUTS * 2 * TILE + i / 2 * 32;
            _mm512_storeu_si512(to, _mm512_unpacklo_epi16(first, second));
            _mm512_storeu_si512(to + TILE, _mm512_unpackhi_epi16(first, second));
        }
    }
}

/* Of sums in the order of `gather_values`, the lower or the upper 16 of 32 dimensions. */
INLINE __m512 in_order(const float *sums, const int upper) {
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i places = upper ? _mm512_add_epi32(low, _mm512_set1_epi32(8)) : low;
    return _mm512_permutex2var_ps(_mm512_loadu_ps(sums), places, _mm512_loadu_ps(sums + LANES));
}

/*
 * Returns whether tiles of keys can be read in place, because 16 positions lie in one block. Values beyond the chunk's
 * count, or never written, only give scores that are masked.
 */
INLINE int is_in_place(const Progress *p, const int64_t *path) {
    return path == NULL && p->attention->block_size % 16 == 0 && p->size == p->attention->head_dim;
}

/* The tile of a half's 16 positions and of a block of 32 inputs has its first number at tiles[half] + block * step, and
   rows `stride` bytes apart. */
typedef struct {
    const uint16_t *tiles[2]; /* the second NULL: there are no more than 16 positions */
    int64_t step, stride;
} Keys;

/* scores = the chunk's keys times a column of queries: [CHUNK, 16]. */
TILE_INLINE void score(const Progress *p, int64_t column, const Keys *keys, float *scores) {
    const uint16_t *queries = p->queries + column * 16 * p->size;
    tile_zero(SCORES);
    tile_zero(MORE_SCORES);
    for (int64_t block = 0; block < p->size / INPUTS; block++) {
        tile_load(QUERIES, queries + block * TILE);
        tile_load_apart(KEYS, keys->tiles[0] + block * keys->step, keys->stride);
        tile_dot(SCORES, KEYS, QUERIES);
        if (keys->tiles[1] == NULL) continue;
        tile_load_apart(MORE_KEYS, keys->tiles[1] + block * keys->step, keys->stride);
        tile_dot(MORE_SCORES, MORE_KEYS, QUERIES);
    }
    tile_store(SCORES, scores);
    tile_store(MORE_SCORES, scores + 16 * LANES);
}

/* The tiles of keys of the part's head number `head`. */
INLINE Keys keys_of(const Progress *p, int64_t head, const Chunk *chunk, const int64_t *path) {
    const Attention *a = p->attention;
    if (!is_in_place(p, path)) {
        gather_keys(p, head, chunk);
        return (Keys){{p->keys, p->keys + TILE}, 2 * TILE, INPUTS * sizeof(uint16_t)};
    }
    const uint16_t *keys = (const uint16_t *)a->keys + head * a->head_dim;
    const uint16_t *more = chunk->count > 16 ? keys + chunk->indices[16] : NULL;
    return (Keys){{keys + chunk->indices[0], more}, INPUTS, a->num_kv_heads * a->head_dim * (int64_t)sizeof(uint16_t)};
}

/* Keys that each query sees of the chunk at `start`. */
INLINE void see(const Progress *p, int64_t start, int64_t column, __mmask16 active, __mmask16 *visible) {
    const __m512i positions = _mm512_loadu_si512(p->positions + column * 16);
    const int64_t span = p->attention->span <= p->max_position ? p->attention->span : p->max_position + 1;
    const __m512i first = _mm512_sub_epi32(positions, _mm512_set1_epi32((int)span));
    for (int k = 0; k < CHUNK; k++) {
        const __m512i key = _mm512_set1_epi32((int)start + k);
        visible[k] = _mm512_mask_cmple_epi32_mask(_mm512_mask_cmpgt_epi32_mask(active, key, first), key, positions);
    }
}

/* The sum of 16 lanes, by halves. */
INLINE float sum_of_lanes(__m512 x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

/*
 * The softmax's weights for a column of queries, as far as is known by now: a tile of queries by positions. Returns
 * by how much what was summed before has to be multiplied. Sums of weights are made by halves, as in weigh_one.
 */
INLINE __m512 weigh(const Progress *p, int64_t column, const float *scores, const __mmask16 *visible, float *weights) {
    const __m512 scale = p->scale, before = _mm512_loadu_ps(p->largest + column * LANES);
    __m512 largest = before, scaled[CHUNK];
#pragma GCC unroll 32
    for (int k = 0; k < CHUNK; k++) {
        scaled[k] = _mm512_mul_ps(_mm512_loadu_ps(scores + k * LANES), scale);
        largest = _mm512_mask_max_ps(largest, visible[k], largest, scaled[k]);
    }
    _Alignas(64) __m512i pairs[CHUNK / 2];
#pragma GCC unroll 16
    for (int k = 0; k < CHUNK; k += 2) {
        const __m512i even = rounded(_mm512_maskz_mov_ps(visible[k], exp_ps(_mm512_sub_ps(scaled[k], largest))));
        const __m512i odd = rounded(_mm512_maskz_mov_ps(visible[k + 1], exp_ps(_mm512_sub_ps(scaled[k + 1], largest))));
        scaled[k] = _mm512_castsi512_ps(even);
        scaled[k + 1] = _mm512_castsi512_ps(odd);
        pairs[k / 2] = paired(even, odd);
    }
    for (int half = CHUNK / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++) scaled[k] = _mm512_add_ps(scaled[k], scaled[k + half]);
    transpose((const float *)pairs, LANES, weights);
    const __m512 rescale = exp_ps(_mm512_sub_ps(before, largest)); /* of -inf - -inf, no score yet: not nought, times nought */
    _mm512_storeu_ps(p->largest + column * LANES, largest);
    const __m512 totals = _mm512_loadu_ps(p->totals + column * LANES);
    _mm512_storeu_ps(p->totals + column * LANES, _mm512_fmadd_ps(totals, rescale, scaled[0]));
    return rescale;
}

INLINE __mmask32 first_keys(int64_t count) {
    return count >= CHUNK ? 0xffffffff : count <= 0 ? 0 : (__mmask32)((1u << count) - 1);
}

/* `weigh` of one query, to the bit: a lane holds a position. Returns its factor. */
INLINE float weigh_one(const Progress *p, int64_t start, int64_t position, int64_t query, const float *scores,
                       float *weights) {
    const __m512i places = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                              _mm512_set1_epi32(LANES));
    const int64_t seen = position + 1 - start, before = seen - p->attention->span;
    const __mmask32 visible = first_keys(seen) & ~first_keys(before);
    const __m512 scale = p->scale;
    const __m512 first = _mm512_mul_ps(_mm512_i32gather_ps(places, scores, 4), scale);
    const __m512 second = _mm512_mul_ps(_mm512_i32gather_ps(places, scores + 16 * LANES, 4), scale);
    const __m512 none = _mm512_set1_ps(-INFINITY);
    const __m512 most = _mm512_max_ps(_mm512_mask_mov_ps(none, (__mmask16)visible, first),
                                      _mm512_mask_mov_ps(none, (__mmask16)(visible >> 16), second));
    const float known = p->largest[query], next = _mm512_reduce_max_ps(most), largest = next > known ? next : known;
    const __m512 top = _mm512_set1_ps(largest);
    const __m512i lower = rounded(_mm512_maskz_mov_ps((__mmask16)visible, exp_ps(_mm512_sub_ps(first, top))));
    const __m512i upper = rounded(_mm512_maskz_mov_ps((__mmask16)(visible >> 16), exp_ps(_mm512_sub_ps(second, top))));
    _mm256_storeu_si256((__m256i *)weights, _mm512_cvtepi32_epi16(_mm512_srli_epi32(lower, 16)));
    _mm256_storeu_si256((__m256i *)weights + 1, _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper, 16)));
    const __m512 rescale = exp_ps(_mm512_set1_ps(known - largest));
    const float total = sum_of_lanes(_mm512_add_ps(_mm512_castsi512_ps(lower), _mm512_castsi512_ps(upper)));
    p->largest[query] = largest;
    const __m512 totals = _mm512_set1_ps(p->totals[query]);
    p->totals[query] = _mm512_cvtss_f32(_mm512_fmadd_ps(totals, rescale, _mm512_set1_ps(total)));
    return _mm512_cvtss_f32(rescale);
}

/* sums = sums * rescale + weights . values, of the column's queries from `first` to `end`. */
TILE_INLINE void accumulate(const Progress *p, int64_t column, int64_t first, int64_t end, const float *weights,
                                   const float *rescale) {
    float *sums = p->sums + column * 16 * p->size;
    _Alignas(64) float products[2][16 * LANES];
    tile_load(WEIGHTS, weights);
    for (int64_t d = 0; d < p->size; d += 2 * LANES) {
        tile_zero(SUMS);
        tile_zero(MORE_SUMS);
        tile_load(VALUES, p->values + d / LANES * TILE);
        tile_load(MORE_VALUES, p->values + (d / LANES + 1) * TILE);
        tile_dot(SUMS, WEIGHTS, VALUES);
        tile_dot(MORE_SUMS, WEIGHTS, MORE_VALUES);
        tile_store(SUMS, products[0]);
        tile_store(MORE_SUMS, products[1]);
        for (int64_t q = first; q < end; q++) {
            const __m512 factor = _mm512_set1_ps(rescale[q]);
#pragma GCC unroll 2
            for (int v = 0; v < 2; v++) {
                float *sum = sums + q * p->size + d + v * LANES;
                const __m512 product = _mm512_load_ps(products[v] + q * LANES);
                _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), factor, product));
            }
        }
    }
}

/* Asks for the keys and values of the part's heads. */
INLINE void ask_for(const Progress *p, const Chunk *chunk) {
    const Attention *a = p->attention;
    for (int64_t i = 0; i < chunk->count; i++)
        for (int64_t d = 0; d < p->part->num_heads * a->head_dim; d += 32) {
            _mm_prefetch((const char *)((const uint16_t *)a->keys + chunk->indices[i] + d), _MM_HINT_T1);
            _mm_prefetch((const char *)((const uint16_t *)a->values + chunk->indices[i] + d), _MM_HINT_T1);
        }
}

INLINE void find_chunk(const Progress *p, int64_t start, int64_t last, const int64_t *path, Chunk *chunk) {
    chunk->start = start;
    chunk->count = last - start < CHUNK ? last + 1 - start : CHUNK;
    find(p->attention, p->part, start, chunk->count, path, chunk->indices);
}

TILE_TARGET static void visit(void *progress, int64_t start, const int64_t *path, int64_t first, int64_t end) {
    Progress *p = progress;
    const int64_t group = group_of(p->attention), row = first_row_of(p->attention, p->part);
    const int64_t *positions = p->attention->positions + row;
    const int64_t last = start + CHUNK - 1, last_seen = positions[(end - 1) / group];
    Chunk chunk;
    if (path == NULL && p->ahead.start == start) chunk = p->ahead;
    else find_chunk(p, start, last_seen, path, &chunk);
    if (path == NULL && last_seen > last) {
        find_chunk(p, last + 1, last_seen, NULL, &p->ahead);
        ask_for(p, &p->ahead);
    }
    /* Whether all see all of it: in the order of positions the first query reaches least far. */
    const int is_whole = path == NULL && last <= positions[first / group] && start > p->max_position - p->attention->span;
    for (int64_t head = 0; head < p->part->num_heads; head++) {
        const Keys keys = keys_of(p, head, &chunk, path);
        gather_values(p, head, &chunk);
        for (int64_t column = first / 16; column * 16 < end; column++) {
            _Alignas(64) float scores[CHUNK * LANES], weights[16 * LANES], rescale[LANES];
            const int64_t of_head = head * p->num_columns + column, left = end - column * 16, before = first - column * 16;
            const int64_t from = before > 0 ? before : 0, to = left < 16 ? left : 16;
            score(p, of_head, &keys, scores);
            if (to - from <= FEW) {
                for (int64_t q = from; q < to; q++) {
                    const int64_t position = p->positions[column * 16 + q];
                    rescale[q] = weigh_one(p, start, position, of_head * 16 + q, scores + q, weights + q * LANES);
                }
            } else {
                __mmask16 visible[CHUNK];
                if (is_whole) memset(visible, 0xff, sizeof visible);
                else see(p, start, column, first_lanes(to) & ~first_lanes(from), visible);
                _mm512_store_ps(rescale, weigh(p, of_head, scores, visible, weights));
            }
            accumulate(p, of_head, from, to, weights, rescale);
        }
    }
}

TILE_INLINE void attend(const Attention *a, const Part *part) {
    const int64_t num_queries = part->num_rows * group_of(a), num_columns = (num_queries + 15) / 16;
    const int64_t of_heads = part->num_heads * num_columns * 16, *row_positions = a->positions + first_row_of(a, part);
    const int64_t size = (a->head_dim + INPUTS - 1) / INPUTS * INPUTS;
    _Alignas(64) uint16_t queries[of_heads * size], keys[CHUNK * size], values[CHUNK * size];
    float sums[of_heads * size], largest[of_heads], totals[of_heads];
    int32_t positions[num_columns * 16];
    int64_t max_position = 0;
    for (int64_t q = 0; q < num_columns * 16; q++) {
        const int64_t position = q < num_queries ? row_positions[q / group_of(a)] : 0;
        positions[q] = (int32_t)position;
        if (position > max_position) max_position = position;
    }
    for (int64_t i = 0; i < of_heads; i++) largest[i] = -INFINITY, totals[i] = 0;
    memset(sums, 0, sizeof sums);
    memset(queries, 0, sizeof queries);
    for (int64_t head = 0; head < part->num_heads; head++)
        lay_out_queries(a, part, part->first_head + head, num_queries, size, queries + head * num_columns * 16 * size);
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf((float)a->head_dim));
    Progress progress = {a, part, num_columns, max_position, size, scale,
                         positions, queries, keys, values, sums, largest, totals, {.start = -1}};
    walk(a, part, CHUNK, visit, &progress);
    for (int64_t head = 0; head < part->num_heads; head++)
        for (int64_t q = 0; q < num_queries; q++) {
            float *y = answer_of(a, part, part->first_head + head, q);
            const int64_t from = head * num_columns * 16 + q;
            const __m512 total = _mm512_set1_ps(totals[from]);
            for (int64_t d = 0; d < a->head_dim; d += INPUTS) {
                const float *summed = sums + from * size + d;
                _mm512_storeu_ps(y + d, _mm512_div_ps(in_order(summed, 0), total));
                if (d + LANES < a->head_dim) _mm512_storeu_ps(y + d + LANES, _mm512_div_ps(in_order(summed, 1), total));
            }
        }
}

typedef struct {
    const Parts *parts;
    Shares *shares;
} Job;

TILE_TARGET static void share_task(const void *job, int64_t share) {
    const Job *j = job;
    TileShapes shapes = {.palette = 1};
    for (int t = 0; t < 8; t++) {
        shapes.row_bytes[t] = 64;
        shapes.rows[t] = t < WEIGHTS || j->parts->max_queries >= 16 ? 16 : (uint8_t)j->parts->max_queries;
    }
    tile_configure(&shapes); /* once a call */
    for (int64_t part; (part = next_of(j->shares, share)) >= 0;) attend(j->parts->attention, &j->parts->parts[part]);
    tile_release(); /* else the system would save the tiles at every switch between threads */
}

void ATTENTION(const Parts *parts, int num_threads) {
    Shares shares;
    const Job job = {parts, &shares};
    divide(&shares, parts->count, num_threads);
    parallel_for(share_task, &job, shares.num_shares, num_threads);
}

#endif
