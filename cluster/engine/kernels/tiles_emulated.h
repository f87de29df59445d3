/*
 * What tiles.h does, in plain C and to the bit: the kernels can be tested without a processor that has tiles.
 *
 * Products of the even and of the odd inputs are summed apart, each by one fused multiplication and addition, then
 * added to each other and to the sum (Intel's Software Developer's Manual, TDPBF16PS); numbers too small to be normal
 * are nought.
 */
#include <float.h>
#include <math.h>
#include <string.h>

#define TILE_TARGET TARGET

typedef struct {
    char bytes[16][64];
} Tile;

static _Thread_local TileShapes shapes_now;
static _Thread_local Tile tiles[8];

static void tile_configure(const TileShapes *shapes) {
    shapes_now = *shapes;
    memset(tiles, 0, sizeof tiles);
}

static void tile_release(void) { memset(&shapes_now, 0, sizeof shapes_now); }

static void tile_zero(int t) { memset(&tiles[t], 0, sizeof tiles[t]); }

static inline void tile_load_apart(int t, const void *from, int64_t stride) {
    for (int row = 0; row < shapes_now.rows[t]; row++) memcpy(tiles[t].bytes[row], (const char *)from + row * stride, 64);
}

static void tile_load(int t, const void *from) { tile_load_apart(t, from, 64); }

static void tile_store(int t, void *to) { memcpy(to, &tiles[t], (size_t)shapes_now.rows[t] * 64); }

static float flushed(float x) { return fabsf(x) < FLT_MIN ? copysignf(0.0f, x) : x; }

static float widened(const char *half) {
    const uint32_t bits = (uint32_t)((const uint16_t *)half)[0] << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return flushed(x);
}

TARGET static void tile_dot(int sums, int rows, int weights) {
    for (int row = 0; row < shapes_now.rows[sums]; row++)
        for (int out = 0; out < 16; out++) {
            float parts[2] = {0, 0}, sum;
            for (int pair = 0; pair < 16; pair++)
                for (int i = 0; i < 2; i++) {
                    const float x = widened(&tiles[rows].bytes[row][4 * pair + 2 * i]);
                    const float weight = widened(&tiles[weights].bytes[pair][4 * out + 2 * i]);
                    parts[i] = flushed(fmaf(x, weight, parts[i]));
                }
            memcpy(&sum, &tiles[sums].bytes[row][4 * out], sizeof sum);
            sum = flushed(sum + flushed(parts[0] + parts[1]));
            memcpy(&tiles[sums].bytes[row][4 * out], &sum, sizeof sum);
        }
}
