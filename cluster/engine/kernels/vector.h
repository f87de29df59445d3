/*
 * Vectors of 16 float32 lanes on any processor: one register of AVX-512, two of AVX2, four of NEON or SSE2.
 *
 * Every operation rounds each lane once, as IEEE 754 says, and in an order that no width changes: all processors compute
 * the same bits. So nothing may be fused or reordered by the compiler (-ffp-contract=off), and a product is fused with a
 * sum where `fma_of` says so. A file that includes this one defines WIDTH, the lanes of a register, and TARGET.
 */
#ifndef OUTRIDER_VECTOR_H
#define OUTRIDER_VECTOR_H

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 16
#define PARTS (LANES / WIDTH) /* registers of a vector */

/* Loops over registers have to disappear: an array of registers that is indexed at run time lies in memory, where
   products take five times as long. */
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

typedef float Floats __attribute__((vector_size(4 * WIDTH))); /* a register */
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef int8_t Bytes __attribute__((vector_size(WIDTH)));
typedef Floats LooseFloats __attribute__((aligned(4), may_alias)); /* the same in memory, at any address */
typedef Ints LooseInts __attribute__((aligned(1), may_alias));
typedef Halves LooseHalves __attribute__((aligned(1), may_alias));
typedef Bytes LooseBytes __attribute__((aligned(1), may_alias));

typedef struct {
    Floats part[PARTS];
} Vector;
typedef struct {
    Ints part[PARTS];
} Mask; /* all bits of a lane are 1 or 0 */

/* Registers. */

INLINE Floats fma_of(Floats a, Floats b, Floats c) { /* a * b + c, rounded once */
#if defined(__x86_64__) && WIDTH == 16
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__x86_64__) && WIDTH == 8
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    Floats result;
    for (int i = 0; i < WIDTH; i++) result[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return result;
#endif
}

INLINE Floats all_of(float x) { return x - (Floats){0}; } /* x + 0 would turn -0 into 0 */
INLINE Floats load_floats(const float *x) { return *(const LooseFloats *)x; }
INLINE void store_floats(float *x, Floats floats) { *(LooseFloats *)x = floats; }
INLINE Floats choose_of(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }
/* Returns b if either is NaN or both are 0: the instructions of processors differ there. */
INLINE Floats max_of(Floats a, Floats b) { return choose_of((Ints)(a > b), a, b); }
INLINE Floats min_of(Floats a, Floats b) { return choose_of((Ints)(a < b), a, b); }

INLINE Floats widen_halves(const uint16_t *halves) {
    return (Floats)(__builtin_convertvector(*(const LooseHalves *)halves, Ints) << 16);
}

INLINE Floats widen_bytes(const int8_t *bytes) { /* GCC compiles the conversion to scalar code without intrinsics. */
#if defined(__x86_64__) && WIDTH == 16
    return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)bytes)));
#elif defined(__x86_64__) && WIDTH == 8
    return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
#else
    return __builtin_convertvector(__builtin_convertvector(*(const LooseBytes *)bytes, Ints), Floats);
#endif
}

/* Rounds to bfloat16, to nearest, ties to even, as PyTorch does. Rounding alone could turn NaN into infinity. */
INLINE void store_halves(uint16_t *to, Floats x) {
    const Ints bits = (Ints)x, rounded = (bits + (((bits >> 16) & 1) + 0x7fff)) >> 16, is_nan = (Ints)(x != x);
    *(LooseHalves *)to = __builtin_convertvector((is_nan & 0x7fc0) | (~is_nan & rounded), Halves);
}

/* e^x within 2 units in the last place; x is clamped to where e^x is a normal number. */
INLINE Floats exp_of(Floats x) {
    x = min_of(max_of(x, all_of(-87.0f)), all_of(88.0f));
    const Floats n = (x * 1.44269504f + 0x1.8p23f) - 0x1.8p23f; /* adding 1.5 * 2^23 rounds to an integer */
    Floats r = fma_of(-n, all_of(0.693359375f), x); /* ln 2 in two parts */
    r = fma_of(-n, all_of(-2.12194440e-4f), r);
    Floats p = all_of(1.0f / 5040);
    const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    UNROLL for (int i = 0; i < 7; i++) p = fma_of(p, r, all_of(coefficients[i]));
    return p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
}

/* Vectors. */

INLINE Vector all(float x) {
    Vector v;
    UNROLL for (int k = 0; k < PARTS; k++) v.part[k] = all_of(x);
    return v;
}
INLINE Vector load(const float *x) {
    Vector v;
    UNROLL for (int k = 0; k < PARTS; k++) v.part[k] = load_floats(x + WIDTH * k);
    return v;
}
INLINE void store(float *x, Vector v) {
    UNROLL for (int k = 0; k < PARTS; k++) store_floats(x + WIDTH * k, v.part[k]);
}
#define BY_PARTS(name, parameters, result) \
    INLINE Vector name parameters { \
        Vector v; \
        UNROLL for (int k = 0; k < PARTS; k++) v.part[k] = result; \
        return v; \
    }
BY_PARTS(add, (Vector a, Vector b), a.part[k] + b.part[k])
BY_PARTS(subtract, (Vector a, Vector b), a.part[k] - b.part[k])
BY_PARTS(multiply, (Vector a, Vector b), a.part[k] * b.part[k])
BY_PARTS(quotient, (Vector a, Vector b), a.part[k] / b.part[k])
BY_PARTS(negative, (Vector a), -a.part[k])
BY_PARTS(fma_v, (Vector a, Vector b, Vector c), fma_of(a.part[k], b.part[k], c.part[k]))
BY_PARTS(exp_v, (Vector x), exp_of(x.part[k]))
BY_PARTS(choose, (Mask mask, Vector yes, Vector no), choose_of(mask.part[k], yes.part[k], no.part[k]))
#undef BY_PARTS

/* Lanes from `first` to `end`, where both are 0 to 16. */
INLINE Mask lanes_between(int64_t first, int64_t end) {
    Mask mask;
    UNROLL for (int k = 0; k < PARTS; k++) {
        Ints lane;
        UNROLL for (int i = 0; i < WIDTH; i++) lane[i] = k * WIDTH + i;
        mask.part[k] = (Ints)(lane >= (int32_t)first) & (Ints)(lane < (int32_t)end);
    }
    return mask;
}

/* Sums halves onto halves: 8 pairs, 4, 2, 1. */
INLINE float sum_of_lanes(Vector v) {
    float x[LANES];
    store(x, v);
    UNROLL for (int half = LANES / 2; half > 0; half /= 2)
        UNROLL for (int i = 0; i < half; i++) x[i] += x[i + half];
    return x[0];
}
/* In the same order, so that NaN has the same effect at every width. */
INLINE float largest_lane(Vector v) {
    float x[LANES];
    store(x, v);
    UNROLL for (int half = LANES / 2; half > 0; half /= 2)
        UNROLL for (int i = 0; i < half; i++) x[i] = x[i] > x[i + half] ? x[i] : x[i + half];
    return x[0];
}

/* The first `count` lanes; the others are 0. */
INLINE Vector load_first(const float *x, int64_t count) {
    if (count >= LANES) return load(x);
    float lanes[LANES] = {0};
    memcpy(lanes, x, (size_t)count * sizeof *x);
    return load(lanes);
}
INLINE void store_first(float *x, int64_t count, Vector v) {
    if (count >= LANES) {
        store(x, v);
        return;
    }
    float lanes[LANES];
    store(lanes, v);
    memcpy(x, lanes, (size_t)count * sizeof *x);
}

/* The same from `index` on in an array of float32 or bfloat16. */
INLINE Vector load_any(const void *array, int64_t index, int64_t count, int is_bfloat16) {
    if (!is_bfloat16) return load_first((const float *)array + index, count);
    const uint16_t *from = (const uint16_t *)array + index;
    uint16_t lanes[LANES] = {0};
    if (count < LANES) from = memcpy(lanes, from, (size_t)count * sizeof *lanes);
    Vector v;
    UNROLL for (int k = 0; k < PARTS; k++) v.part[k] = widen_halves(from + WIDTH * k);
    return v;
}
INLINE void store_any(void *array, int64_t index, int64_t count, Vector v, int is_bfloat16) {
    if (!is_bfloat16) {
        store_first((float *)array + index, count, v);
        return;
    }
    uint16_t lanes[LANES], *to = (uint16_t *)array + index, *whole = count < LANES ? lanes : to;
    UNROLL for (int k = 0; k < PARTS; k++) store_halves(whole + WIDTH * k, v.part[k]);
    if (count < LANES) memcpy(to, lanes, (size_t)count * sizeof *lanes);
}

#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif
/* Transposes WIDTH rows: blocks on both sides of the diagonal are exchanged, of half of a register, a quarter, and so on. */
INLINE void turn_round(Floats *a) {
#define EXCHANGE(size, first, second) \
    UNROLL for (int i = 0; i < WIDTH; i++) if ((i & size) == 0) { \
        const Floats x = a[i], y = a[i + size]; \
        a[i] = first; \
        a[i + size] = second; \
    }
#if WIDTH == 16
    EXCHANGE(8, SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
             SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
    EXCHANGE(4, SHUFFLE(x, y, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
             SHUFFLE(x, y, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
    EXCHANGE(2, SHUFFLE(x, y, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
             SHUFFLE(x, y, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
    EXCHANGE(1, SHUFFLE(x, y, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
             SHUFFLE(x, y, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#elif WIDTH == 8
    EXCHANGE(4, SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11), SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15))
    EXCHANGE(2, SHUFFLE(x, y, 0, 1, 8, 9, 4, 5, 12, 13), SHUFFLE(x, y, 2, 3, 10, 11, 6, 7, 14, 15))
    EXCHANGE(1, SHUFFLE(x, y, 0, 8, 2, 10, 4, 12, 6, 14), SHUFFLE(x, y, 1, 9, 3, 11, 5, 13, 7, 15))
#else
    EXCHANGE(2, SHUFFLE(x, y, 0, 1, 4, 5), SHUFFLE(x, y, 2, 3, 6, 7))
    EXCHANGE(1, SHUFFLE(x, y, 0, 4, 2, 6), SHUFFLE(x, y, 1, 5, 3, 7))
#endif
#undef EXCHANGE
}

#endif
