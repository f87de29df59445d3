/*
 * A row's noise is needed in full for a few of its tokens only: the others cannot reach the best score seen so far
 * even with an upper bound of their noise, which costs four instructions for sixteen tokens. What is left to pay for
 * is the random words (Philox4x64-10: Salmon, Moraes, Dror, Shaw, SC 2011), eight counters at a time.
 */
#include <immintrin.h>
#include <math.h>

#include "sampling.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 16
#define CHAINS 2 /* of eight counters, or 64 tokens */
#define CHUNK (64 * CHAINS)
#define VECTORS (CHUNK / LANES)
#define ROUNDS 10
#define LARGEST_NOISE 22.9f /* of the word 0: 33 ln 2 */

typedef struct {
    uint64_t keys[ROUNDS][2];
    uint64_t position;
} Noise;

/* The best tokens so far, in the order in which they are returned. */
typedef struct {
    int64_t *ids;
    float *scores;
    int64_t width;
} Best;

static Noise noise_of(const uint64_t key[2], uint64_t position) {
    Noise noise = {.keys = {{key[0], key[1]}}, .position = position};
    for (int r = 1; r < ROUNDS; r++) {
        noise.keys[r][0] = noise.keys[r - 1][0] + 0x9E3779B97F4A7C15u;
        noise.keys[r][1] = noise.keys[r - 1][1] + 0xBB67AE8584CAA73Bu;
    }
    return noise;
}

/* The 128 bits of a * m, from four products of halves. */
INLINE void multiply(__m512i a, uint64_t m, __m512i *high, __m512i *low) {
    const __m512i m_low = _mm512_set1_epi64((int64_t)(m & 0xffffffff)), m_high = _mm512_set1_epi64((int64_t)(m >> 32));
    const __m512i a_high = _mm512_shuffle_epi32(a, 0xf5);
    const __m512i low_low = _mm512_mul_epu32(a, m_low), low_high = _mm512_mul_epu32(a, m_high);
    const __m512i high_low = _mm512_mul_epu32(a_high, m_low), high_high = _mm512_mul_epu32(a_high, m_high);
    const __m512i upper = _mm512_add_epi64(high_low, _mm512_srli_epi64(low_low, 32));
    const __m512i middle = _mm512_add_epi64(low_high, _mm512_and_si512(upper, _mm512_set1_epi64(0xffffffff)));
    const __m512i carried = _mm512_add_epi64(_mm512_srli_epi64(upper, 32), _mm512_srli_epi64(middle, 32));
    *high = _mm512_add_epi64(high_high, carried);
    *low = _mm512_mask_shuffle_epi32(low_low, 0xaaaa, middle, 0xa0);
}

/* The words of the 64 tokens of eight counters (word by word) in the tokens' order. */
INLINE void reorder(const __m512i *c, __m512i *words) {
    const __m512i even_low = _mm512_unpacklo_epi64(c[0], c[1]), odd_low = _mm512_unpackhi_epi64(c[0], c[1]);
    const __m512i even_high = _mm512_unpacklo_epi64(c[2], c[3]), odd_high = _mm512_unpackhi_epi64(c[2], c[3]);
    const __m512i counters[] = {_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                                _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        const __m512i even = _mm512_permutex2var_epi64(even_low, counters[i], even_high);
        const __m512i odd = _mm512_permutex2var_epi64(odd_low, counters[i], odd_high);
        words[2 * i] = _mm512_shuffle_i64x2(even, odd, 0x44);
        words[2 * i + 1] = _mm512_shuffle_i64x2(even, odd, 0xee);
    }
}

/* The words of a chunk's tokens. Two chains of rounds fill the processor where one waits for its products. */
INLINE void random_words(const Noise *noise, int64_t first, __m512i *words) {
    const __m512i lane = _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7);
    __m512i c[CHAINS][4];
#pragma GCC unroll 2
    for (int i = 0; i < CHAINS; i++) {
        c[i][0] = _mm512_add_epi64(_mm512_set1_epi64(first / 8 + 8 * i), lane);
        c[i][1] = _mm512_set1_epi64((int64_t)noise->position);
        c[i][2] = c[i][3] = _mm512_setzero_si512();
    }
#pragma GCC unroll 10
    for (int r = 0; r < ROUNDS; r++) {
        const __m512i key0 = _mm512_set1_epi64((int64_t)noise->keys[r][0]);
        const __m512i key1 = _mm512_set1_epi64((int64_t)noise->keys[r][1]);
#pragma GCC unroll 2
        for (int i = 0; i < CHAINS; i++) {
            __m512i high0, low0, high1 = _mm512_setzero_si512(), low1 = high1;
            multiply(c[i][0], 0xD2E7470EE14C6C93u, &high0, &low0);
            if (r > 0) multiply(c[i][2], 0xCA5A826395121157u, &high1, &low1); /* 0 at first */
            c[i][0] = _mm512_xor_si512(_mm512_xor_si512(high1, c[i][1]), key0);
            c[i][2] = _mm512_xor_si512(_mm512_xor_si512(high0, c[i][3]), key1);
            c[i][1] = low1;
            c[i][3] = low0;
        }
    }
#pragma GCC unroll 2
    for (int i = 0; i < CHAINS; i++) reorder(c[i], words + 4 * i);
}

/* As noise.py defines it. */
static float noise_of_word(uint32_t word) {
    const double v = (word + 0.5) * 0x1p-32;
    return (float)-log(-log1p(-v));
}

/*
 * At least noise_of_word, and little more where that is large.
 *
 * -log(-log1p(-v)) <= -log(v), and a float's bits, read as an integer, are its logarithm to base 2 with the
 * mantissa's part replaced by a chord under it: (bits / 2^23 - 127) <= log2. Roundings in here are below 1e-4.
 */
INLINE __m512 noise_bound(__m512i words) {
    const float ln2 = 0.693147181f;
    const __m512 bits = _mm512_cvtepi32_ps(_mm512_castps_si512(_mm512_cvtepu32_ps(words)));
    return _mm512_fmadd_ps(bits, _mm512_set1_ps(-ln2 * 0x1p-23f), _mm512_set1_ps((32 + 127) * ln2 + 1e-3f));
}

/* What a score must exceed to count: the tokens before it come first among equals. */
INLINE __m512 threshold(const Best *best) { return _mm512_set1_ps(best->scores[best->width - 1]); }

static void insert(Best *best, int64_t id, float score) {
    int64_t place = best->width - 1;
    for (; place > 0 && best->scores[place - 1] < score; place--) {
        best->scores[place] = best->scores[place - 1];
        best->ids[place] = best->ids[place - 1];
    }
    best->scores[place] = score;
    best->ids[place] = id;
}

/* Scores the tokens `wanted` of sixteen; a better one among them makes the others' bounds count anew. */
TARGET static void consider(
    Best *best, int64_t first, unsigned wanted, __m512 x, __m512 bound, const __m512i *words) {
    float values[LANES];
    uint32_t own_words[LANES];
    _mm512_storeu_ps(values, x);
    if (words != NULL) _mm512_storeu_si512(own_words, *words);
    for (; wanted != 0; wanted &= wanted - 1) {
        const int i = __builtin_ctz(wanted);
        const float score = words == NULL ? values[i] : values[i] + noise_of_word(own_words[i]);
        if (!(score > best->scores[best->width - 1])) continue;
        insert(best, first + i, score);
        wanted &= _mm512_cmp_ps_mask(bound, threshold(best), _CMP_GT_OQ) | 1u << i;
    }
}

/* A chunk's tokens; those beyond the row have -inf. */
INLINE void load_chunk(const float *logits, int64_t count, float temperature, __m512 *x) {
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) {
        const int64_t left = count - LANES * v;
        const __mmask16 inside = left >= LANES ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
        x[v] = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), inside, logits + LANES * v);
        if (temperature != 1.0f) x[v] = _mm512_div_ps(x[v], _mm512_set1_ps(temperature));
    }
}

/* Whether a token of the chunk with that much noise would count. */
INLINE int any_exceeds(const __m512 *x, float noise, const Best *best) {
    __m512 largest = x[0];
#pragma GCC unroll 8
    for (int v = 1; v < VECTORS; v++) largest = _mm512_max_ps(largest, x[v]);
    return _mm512_cmp_ps_mask(_mm512_add_ps(largest, _mm512_set1_ps(noise)), threshold(best), _CMP_GT_OQ) != 0;
}

/* No token is missed: addition is monotone in float32 too, so that x plus a bound of the noise is not below the
   score. (Comparing x with a difference would round otherwise.) */
TARGET static void draw_row(
    const float *logits, int64_t vocab_size, float temperature, const Noise *noise, Best *best) {
    for (int64_t first = 0; first < vocab_size; first += CHUNK) {
        __m512 x[VECTORS];
        load_chunk(logits + first, vocab_size - first, temperature, x);
        if (!any_exceeds(x, LARGEST_NOISE, best)) continue;
        __m512i words[VECTORS];
        random_words(noise, first, words);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            const __m512 bound = _mm512_add_ps(x[v], noise_bound(words[v]));
            const unsigned wanted = _mm512_cmp_ps_mask(bound, threshold(best), _CMP_GT_OQ);
            if (wanted != 0) consider(best, first + LANES * v, wanted, x[v], bound, &words[v]);
        }
    }
}

TARGET static void draw_greedy_row(const float *logits, int64_t vocab_size, Best *best) {
    for (int64_t first = 0; first < vocab_size; first += CHUNK) {
        __m512 x[VECTORS];
        load_chunk(logits + first, vocab_size - first, 1.0f, x);
        if (!any_exceeds(x, 0.0f, best)) continue;
        for (int v = 0; v < VECTORS; v++) {
            const unsigned wanted = _mm512_cmp_ps_mask(x[v], threshold(best), _CMP_GT_OQ);
            if (wanted != 0) consider(best, first + LANES * v, wanted, x[v], x[v], NULL);
        }
    }
}

void draw(const Run *runs, int64_t num_runs, int64_t vocab_size, int64_t width, int64_t *ids, float *scores) {
    Best best = {ids, scores, width};
    for (const Run *run = runs; run < runs + num_runs; run++) {
        for (int64_t row = 0; row < run->num_rows; row++, best.ids += width, best.scores += width) {
            const float *logits = run->logits + row * vocab_size;
            for (int64_t i = 0; i < width; i++) {
                best.ids[i] = i;
                best.scores[i] = -INFINITY;
            }
            if (run->temperature == 0.0) {
                draw_greedy_row(logits, vocab_size, &best);
                continue;
            }
            const Noise noise = noise_of(run->key, run->position + (uint64_t)row);
            draw_row(logits, vocab_size, (float)run->temperature, &noise, &best);
        }
    }
}
