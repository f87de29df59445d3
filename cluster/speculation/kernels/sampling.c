/*
 * A row's noise is needed in full for a few of its tokens only: the others cannot reach the best score seen so far
 * even with an upper bound of their noise, which costs a few instructions for several tokens. The remaining cost is that
 * of the random words (Philox4x64-10: Salmon, Moraes, Dror, Shaw, SC 2011). Choices are exact, so they do not depend on
 * the width of registers.
 */
#include <math.h>
#include <string.h>

#include "sampling.h"

#define TOKENS_OF_COUNTER 8 /* four words of 64 bits */
#define CHUNK 128           /* tokens */
#define PART 16             /* tokens whose bounds are looked at together */
#define ROUNDS 10
#define CHAINS 2 /* of counters, computed together: one alone would wait for its products */
#define LARGEST_NOISE 22.9f /* of the word 0: 33 ln 2 */

#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

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

/* As noise.py defines it. */
static float noise_of_word(uint32_t word) {
    const double v = (word + 0.5) * 0x1p-32;
    return (float)-log(-log1p(-v));
}

/*
 * At least noise_of_word, and little more where that is large.
 *
 * -log(-log1p(-v)) <= -log(v), and a float's bits, read as an integer, are its logarithm to base 2 with the
 * mantissa's part replaced by a chord under it: (bits / 2^23 - 127) <= log2. Roundings in here are below 1e-4. `word >> 1`
 * fits into a signed number, which every processor converts, and has an exponent less.
 */
static inline float noise_bound(uint32_t word) {
    const float ln2 = 0.693147181f, half = (float)(int32_t)(word >> 1);
    int32_t bits;
    memcpy(&bits, &half, sizeof bits);
    return (float)bits * (-ln2 * 0x1p-23f) + ((31 + 127) * ln2 + 1e-3f);
}

/* What a score must exceed to count: the tokens before it come first among equals. */
static float threshold(const Best *best) { return best->scores[best->width - 1]; }

static void insert(Best *best, int64_t id, float score) {
    int64_t place = best->width - 1;
    for (; place > 0 && best->scores[place - 1] < score; place--) {
        best->scores[place] = best->scores[place - 1];
        best->ids[place] = best->ids[place - 1];
    }
    best->scores[place] = score;
    best->ids[place] = id;
}

#define OF_WIDTH(name, width) name##_##width
#if defined(__x86_64__)
#include <immintrin.h>
#define COUNTERS 8
#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define NAME(name) OF_WIDTH(name, 16)
#include "rows.h"
#undef COUNTERS
#undef TARGET
#undef NAME
#define COUNTERS 4
#define TARGET __attribute__((target("avx2")))
#define NAME(name) OF_WIDTH(name, 8)
#include "rows.h"
#undef COUNTERS
#undef TARGET
#undef NAME
#endif
#define COUNTERS 1
#define TARGET
#define NAME(name) OF_WIDTH(name, 4)
#include "rows.h"

typedef void (*DrawRow)(const float *logits, int64_t vocab_size, float temperature, const Noise *noise, Best *best);

static DrawRow best_draw_row(void) {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return draw_row_16;
    if (__builtin_cpu_supports("avx2")) return draw_row_8;
#endif
    return draw_row_4;
}

void draw(const Run *runs, int64_t num_runs, int64_t vocab_size, int64_t width, int64_t *ids, float *scores) {
    const DrawRow draw_row = best_draw_row();
    Best best = {ids, scores, width};
    for (const Run *run = runs; run < runs + num_runs; run++) {
        for (int64_t row = 0; row < run->num_rows; row++, best.ids += width, best.scores += width) {
            const float *logits = run->logits + row * vocab_size;
            for (int64_t i = 0; i < width; i++) {
                best.ids[i] = i;
                best.scores[i] = -INFINITY;
            }
            if (run->temperature == 0.0) {
                draw_row(logits, vocab_size, 1.0f, NULL, &best);
                continue;
            }
            const Noise noise = noise_of(run->key, run->position + (uint64_t)row);
            draw_row(logits, vocab_size, (float)run->temperature, &noise, &best);
        }
    }
}
