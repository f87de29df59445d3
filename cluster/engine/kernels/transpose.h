#ifndef OUTRIDER_TRANSPOSE_H
#define OUTRIDER_TRANSPOSE_H

#include "avx512.h"

/* 16 rows become 16 columns: a lane of column c is a row. */
INLINE void turn_round(__m512 *a) {
    __m512 b[16];
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
        a[c] = _mm512_shuffle_f32x4(top_even, bottom_even, 0x88);
        a[c + 4] = _mm512_shuffle_f32x4(top_odd, bottom_odd, 0x88);
        a[c + 8] = _mm512_shuffle_f32x4(top_even, bottom_even, 0xdd);
        a[c + 12] = _mm512_shuffle_f32x4(top_odd, bottom_odd, 0xdd);
    }
}

/* The same from memory, where rows lie `stride` apart, to memory. */
INLINE void transpose(const float *rows, int64_t stride, float *columns) {
    __m512 a[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_ps(rows + i * stride);
    turn_round(a);
#pragma GCC unroll 16
    for (int c = 0; c < 16; c++) _mm512_storeu_ps(columns + c * LANES, a[c]);
}

#endif
