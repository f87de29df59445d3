/*
 * Attention in float32, in chunks of 16 positions. Keys are transposed once a chunk, so that a lane holds one position
 * for all queries of their head. A score is one lane and one chain over the dimensions, a sum of values one lane and one
 * chain over the positions; only a chunk's maximum and total cross lanes, in an order that no width changes.
 */
#define CHUNK LANES
#define LINE 64       /* bytes */
#define MAX_QUERIES 4 /* that are computed together */
#if WIDTH == 16
#define SUMS 4 /* registers of a query's sums */
#else
#define SUMS 2
#endif

/* Indices in the cache of a chunk's 16 keys or values, for one head. Those after `count` repeat the first. */
typedef struct {
    int64_t indices[CHUNK];
    int64_t count;
} Places;

INLINE int64_t bytes_of(const Attention *a, int64_t count) { return a->is_bfloat16 ? 2 * count : 4 * count; }

/* Prefetches a part of a vector into L2: L1 has the current chunk. */
INLINE void prefetch(const void *cache, int64_t first_byte, const int64_t num_bytes) {
    UNROLL for (int64_t byte = 0; byte < num_bytes; byte += LINE)
        __builtin_prefetch((const char *)cache + first_byte + byte, 0, 2);
}

/* Transposes one head's keys to [head_dim, CHUNK], WIDTH keys at a time: all 16 can lie in the same set of L1. */
INLINE void gather_columns(const Attention *a, const Places *places, float *columns) {
    if (a->is_bfloat16 && a->head_dim % (2 * LANES) == 0) {
        /* Two dimensions are transposed as one number and separated afterwards: half of the work. */
        for (int64_t i = 0; i < CHUNK; i += WIDTH)
            for (int64_t d = 0; d < a->head_dim; d += 2 * WIDTH) {
                Floats pairs[WIDTH];
                UNROLL for (int64_t r = 0; r < WIDTH; r++)
                    pairs[r] = (Floats)*(const LooseInts *)((const uint16_t *)a->keys + places->indices[i + r] + d);
                turn_round(pairs);
                UNROLL for (int64_t c = 0; c < WIDTH; c++) {
                    float *column = columns + (d + 2 * c) * CHUNK + i;
                    store_floats(column, (Floats)((Ints)pairs[c] << 16));
                    store_floats(column + CHUNK, (Floats)((Ints)pairs[c] & (int32_t)0xffff0000));
                }
            }
        return;
    }
    for (int64_t i = 0; i < CHUNK; i += WIDTH)
        for (int64_t d = 0; d < a->head_dim; d += WIDTH) {
            Floats rows[WIDTH];
            UNROLL for (int64_t r = 0; r < WIDTH; r++) {
                const int64_t index = places->indices[i + r] + d;
                rows[r] = a->is_bfloat16 ? widen_halves((const uint16_t *)a->keys + index)
                                         : load_floats((const float *)a->keys + index);
            }
            turn_round(rows);
            UNROLL for (int64_t c = 0; c < WIDTH; c++) store_floats(columns + (d + c) * CHUNK + i, rows[c]);
        }
}

/* One head's values; 0 after the last. */
INLINE void gather_rows(const Attention *a, const Places *places, float *rows) {
    const int64_t size = a->head_dim;
    for (int64_t i = 0; i < places->count; i++) {
        const int64_t index = places->indices[i];
        if (!a->is_bfloat16) memcpy(rows + i * size, (const float *)a->values + index, (size_t)size * sizeof *rows);
        else
            for (int64_t d = 0; d < size; d += WIDTH)
                store_floats(rows + i * size + d, widen_halves((const uint16_t *)a->values + index + d));
    }
    memset(rows + places->count * a->head_dim, 0, (size_t)((CHUNK - places->count) * a->head_dim) * sizeof *rows);
}

/* Scores of a chunk for `count` (a constant) queries. Meanwhile prefetches the keys at `next`, unless it is NULL. */
INLINE void score(const Attention *a, const float *const *queries, const float *columns, const Places *next,
                  const int count, Vector *scores) {
    Vector sums[MAX_QUERIES];
    UNROLL for (int q = 0; q < count; q++) sums[q] = all(0);
    for (int64_t d = 0; d < a->head_dim; d++) {
        const int64_t line = d / LANES * LINE; /* bytes, of each key in turn */
        if (next != NULL && line < bytes_of(a, a->head_dim))
            prefetch(a->keys, bytes_of(a, next->indices[d % LANES]) + line, LINE);
        const Vector column = load(columns + d * CHUNK);
        UNROLL for (int q = 0; q < count; q++) sums[q] = fma_v(all(queries[q][d]), column, sums[q]);
    }
    UNROLL for (int q = 0; q < count; q++) scores[q] = sums[q];
}

/* Weights of a chunk for some queries, and where their sums are. */
typedef struct {
    float *sums[MAX_QUERIES], scales[MAX_QUERIES], weights[MAX_QUERIES][CHUNK];
    int64_t count;
} Taken;

/* sums = sums * scale + weights . values for `count` (a constant) queries, and `size` (too) registers from `d`. Meanwhile
   prefetches the values at `next`, unless it is NULL. */
INLINE void accumulate_at(const Attention *a, const Taken *t, const float *values, const Places *next, int64_t d,
                          const int size, const int count) {
    Floats sums[MAX_QUERIES][SUMS];
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int k = 0; k < size; k++) sums[q][k] = load_floats(t->sums[q] + d + WIDTH * k) * all_of(t->scales[q]);
    for (int64_t i = 0; i < CHUNK; i++) {
        if (next != NULL) prefetch(a->values, bytes_of(a, next->indices[i] + d), size * WIDTH * 4);
        Floats value[SUMS];
        UNROLL for (int k = 0; k < size; k++) value[k] = load_floats(values + i * a->head_dim + d + WIDTH * k);
        UNROLL for (int q = 0; q < count; q++) {
            const Floats weight = all_of(t->weights[q][i]);
            UNROLL for (int k = 0; k < size; k++) sums[q][k] = fma_of(weight, value[k], sums[q][k]);
        }
    }
    UNROLL for (int q = 0; q < count; q++)
        UNROLL for (int k = 0; k < size; k++) store_floats(t->sums[q] + d + WIDTH * k, sums[q][k]);
}

INLINE void accumulate(const Attention *a, const Taken *t, const float *values, const Places *next, const int count) {
    int64_t d = 0;
    for (; d + WIDTH * SUMS <= a->head_dim; d += WIDTH * SUMS) accumulate_at(a, t, values, next, d, SUMS, count);
    for (; d < a->head_dim; d += WIDTH) accumulate_at(a, t, values, next, d, 1, count);
}

/* State of a part's queries; head by head, then query by query. */
typedef struct {
    const Attention *attention;
    const Part *part;
    int64_t num_queries;      /* of a head */
    const int64_t *positions; /* of the part's rows; a row sees positions up to its own */
    const float **queries;    /* [heads, num_queries] vectors of head_dim */
    float *sums;              /* [heads, num_queries, head_dim] */
    float *largest, *totals;  /* [heads, num_queries]: of the scores, and of their exponentials */
    float *rows, *columns;    /* [CHUNK, head_dim], [head_dim, CHUNK]: room for a chunk */
} Progress;

/* Takes what the queries `first` to `end` of one head see of the chunk, which is in `rows` and `columns`; `next`: the
   vectors that come after it. */
INLINE void take(const Progress *p, int64_t head, int64_t start, int64_t first, int64_t end, const Places *next) {
    const Attention *a = p->attention;
    const int64_t head_dim = a->head_dim, group = group_of(a), before_head = head * p->num_queries;
    const Vector scale = all(1.0f / sqrtf((float)head_dim));
    for (int64_t q = first; q < end; q += MAX_QUERIES) {
        const int64_t num_queries = end - q < MAX_QUERIES ? end - q : MAX_QUERIES;
        Vector scores[MAX_QUERIES];
        switch (num_queries) {
#define CASE(n) \
    case n: score(a, p->queries + before_head + q, p->columns, q == first ? next : NULL, n, scores); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
        Taken taken = {.count = 0}; /* only queries that see a part of the chunk */
        for (int64_t i = 0; i < num_queries; i++) {
            const int64_t last = p->positions[(q + i) / group] + 1 - start, before = last - a->span;
            if (last <= 0 || before >= CHUNK) continue;
            float *largest = p->largest + before_head + q + i, *total = p->totals + before_head + q + i;
            const Mask visible = lanes_between(before > 0 ? before : 0, last < CHUNK ? last : CHUNK);
            const Vector scaled = multiply(scores[i], scale);
            const float most = largest_lane(choose(visible, scaled, all(-INFINITY)));
            const float now = most > *largest ? most : *largest;
            const Vector weights = choose(visible, exp_v(subtract(scaled, all(now))), all(0));
            const float rescale = exp_of(all_of(*largest - now))[0];
            *largest = now;
            *total = __builtin_fmaf(*total, rescale, sum_of_lanes(weights));
            taken.sums[taken.count] = p->sums + (before_head + q + i) * head_dim;
            taken.scales[taken.count] = rescale;
            store(taken.weights[taken.count++], weights);
        }
        switch (taken.count) {
#define CASE(n) \
    case n: accumulate(a, &taken, p->rows, q == first ? next : NULL, n); break;
            CASE(1) CASE(2) CASE(3) CASE(4)
#undef CASE
        }
    }
}

INLINE void find_places(const Progress *p, int64_t start, int64_t count, const int64_t *path, Places *places) {
    places->count = count < CHUNK ? count : CHUNK;
    find(p->attention, p->part, start, places->count, path, places->indices);
    for (int64_t i = places->count; i < CHUNK; i++) places->indices[i] = places->indices[0];
}

static TARGET void visit(void *progress, int64_t start, const int64_t *path, int64_t first, int64_t end) {
    const Progress *p = progress;
    const Attention *a = p->attention;
    const int64_t seen = p->positions[(end - 1) / group_of(a)] + 1 - start;
    Places places, next;
    find_places(p, start, seen, path, &places);
    for (int64_t head = 0; head < p->part->num_heads; head++) {
        gather_columns(a, &places, p->columns);
        gather_rows(a, &places, p->rows);
        if (head + 1 == p->part->num_heads && path == NULL && seen > CHUNK)
            find_places(p, start + CHUNK, seen - CHUNK, NULL, &next);
        else
            for (int64_t i = 0; i < CHUNK; i++) next.indices[i] = places.indices[i] + a->head_dim;
        take(p, head, start, first, end, &next);
        for (int64_t i = 0; i < CHUNK; i++) places.indices[i] += a->head_dim;
    }
}

static TARGET void attend(const void *job, int64_t item) {
    const Attention *a = ((const Parts *)job)->attention;
    const Part *part = &((const Parts *)job)->parts[item];
    const int64_t head_dim = a->head_dim, num_queries = part->num_rows * group_of(a), count = part->num_heads * num_queries;
    float room[2 * CHUNK * head_dim + count * head_dim + LINE / sizeof(float)], largest[count], totals[count];
    float *rows = (float *)(((uintptr_t)room + LINE - 1) / LINE * LINE); /* else vectors lie across lines */
    float *columns = rows + CHUNK * head_dim, *sums = columns + CHUNK * head_dim;
    const float *queries[count];
    for (int64_t i = 0; i < count; i++) {
        queries[i] = query_of(a, part, part->first_head + i / num_queries, i % num_queries);
        largest[i] = -INFINITY;
        totals[i] = 0;
    }
    memset(sums, 0, (size_t)(count * head_dim) * sizeof *sums);
    Progress progress = {a, part, num_queries, a->positions + first_row_of(a, part), queries, sums, largest, totals, rows, columns};
    walk(a, part, CHUNK, visit, &progress);
    for (int64_t i = 0; i < count; i++) {
        float *y = answer_of(a, part, part->first_head + i / num_queries, i % num_queries);
        for (int64_t d = 0; d < head_dim; d += LANES)
            store(y + d, quotient(load(sums + i * head_dim + d), all(totals[i])));
    }
}

static void attention_portable(const Parts *parts, int num_threads) {
    parallel_for(attend, parts, parts->count, num_threads);
}
