/*
 * The few instructions for tiles that the kernels use, t being numbers of tiles that are constants; with EMULATE_TILES
 * what does the same in plain C.
 */
#ifndef OUTRIDER_TILES_H
#define OUTRIDER_TILES_H

#include <stdint.h>

#include "avx512.h"

typedef struct { /* as the processor reads it */
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} TileShapes;

/* INLINE has a target already, and clang refuses two. */
#define TILE_INLINE static inline __attribute__((always_inline)) TILE_TARGET

#ifdef EMULATE_TILES
#include "tiles_emulated.h"
#else

/* Not the compiler's intrinsics: those of GCC 12 say neither that a load reads what was stored before it nor that a
   configuration has more than 8 bytes. */
#define TILE_TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,amx-tile,amx-bf16")))

INLINE void tile_configure(const TileShapes *shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(*shapes)); }

INLINE void tile_release(void) { __asm__ volatile("tilerelease"); }

#define tile_zero(t) __asm__ volatile("tilezero %%tmm%c0" ::"i"(t))

/* Rows of 64 bytes, `stride` bytes apart, or one after the other. */
#define tile_load_apart(t, from, stride) \
    __asm__ volatile( \
        "tileloadd (%1,%2,1), %%tmm%c0" ::"i"(t), "r"((const void *)(from)), "r"((int64_t)(stride)) : "memory")
#define tile_load(t, from) tile_load_apart(t, from, 64)
#define tile_store(t, to) \
    __asm__ volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(t), "r"((void *)(to)), "r"((int64_t)64) : "memory")

/* sums[row][output] += the products of 32 inputs. */
#define tile_dot(sums, rows, weights) \
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(rows), "i"(weights))

#endif
#endif
