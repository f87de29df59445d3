/* Prints a hash over what the portable kernels compute from numbers that a formula makes, for every width of registers. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

static uint32_t state;

static uint32_t next_number(void) { return (state = state * 1664525u + 1013904223u) >> 8; }

/* Numbers between -1 and 1, as floats or as the bits of bfloat16. */
static float *floats(int64_t count) {
    float *x = malloc((size_t)count * sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = (float)((int)(next_number() % 2001) - 1000) / 1000;
    return x;
}
static void *bytes(int64_t count, Format format) {
    uint8_t *x = malloc((size_t)count);
    for (int64_t i = 0; i < count; i++) x[i] = (uint8_t)next_number();
    if (format == BFLOAT16) /* magnitudes from 1/64 to 1/32 */
        for (int64_t i = 0; i < count / 2; i++) ((uint16_t *)x)[i] = 0x3c80 | (((uint16_t *)x)[i] & 0x807f);
    return x;
}

static Weight weight_of(Format format, int64_t out_features, int64_t in_features) {
    const int64_t panels = (out_features + 63) / 64, group_size = format == INT4 ? 32 : in_features;
    const int64_t count = panels * 64 * in_features;
    return (Weight){
        .panels = format == FLOAT32 ? (void *)floats(count) : bytes(format == BFLOAT16 ? 2 * count : count, format),
        .scales = floats(panels * 64 * (in_features / group_size)), .bias = floats(out_features),
        .in_features = in_features, .out_features = out_features, .group_size = group_size, .format = format,
        .instruction_set = PORTABLE,
    };
}

static uint64_t hash(uint64_t h, const float *x, int64_t count) { /* FNV-1a */
    for (int64_t i = 0; i < 4 * count; i++) h = (h ^ ((const uint8_t *)x)[i]) * 0x100000001b3u;
    return h;
}

static uint64_t products(uint64_t h) {
    for (int format = FLOAT32; format <= INT4; format++)
        for (int64_t rows = 1; rows <= 61; rows += rows < 8 ? 1 : 53) {
            const Weight weight = weight_of(format, 130, 256);
            float *y = calloc((size_t)(rows * 130), sizeof *y);
            linear(&(Linear){floats(rows * 256), &weight, y, NULL, rows}, 2);
            h = hash(h, y, rows * 130);
        }
    return h;
}

static uint64_t passes(uint64_t h, int is_bfloat16) {
    enum { ROWS = 5, PREFIX = 45, SIZE = 100, HEADS = 4, KV_HEADS = 2, HEAD = 32, INNER = 96, VOCABULARY = 70, SLOTS = 64 };
    const Format format = is_bfloat16 ? BFLOAT16 : FLOAT32;
    const int64_t kv = SLOTS * KV_HEADS * HEAD;
    Layer layer = {
        .input_norm = floats(SIZE), .post_attention_norm = floats(SIZE), .qk_norm = floats((HEADS + KV_HEADS) * HEAD),
        .qkv = weight_of(format, (HEADS + 2 * KV_HEADS) * HEAD, SIZE), .output = weight_of(INT4, SIZE, HEADS * HEAD),
        .gate_up = weight_of(format, 2 * INNER, SIZE), .down = weight_of(INT8, SIZE, INNER), .span = 40,
    };
    layer.keys = is_bfloat16 ? bytes(2 * kv, BFLOAT16) : (void *)floats(kv);
    layer.values = is_bfloat16 ? bytes(2 * kv, BFLOAT16) : (void *)floats(kv);
    float angles[SLOTS * HEAD / 2], cos[SLOTS * HEAD / 2], sin[SLOTS * HEAD / 2];
    for (int i = 0; i < SLOTS * HEAD / 2; i++) angles[i] = (float)i * 97.3f;
    cos_sin(angles, SLOTS * HEAD / 2, cos, sin);
    const Model model = {
        .layers = &layer, .embedding = is_bfloat16 ? bytes(2 * VOCABULARY * SIZE, BFLOAT16) : (void *)floats(VOCABULARY * SIZE),
        .cos = cos, .sin = sin, .norm = floats(SIZE), .head = weight_of(format, VOCABULARY, SIZE), .num_layers = 1,
        .hidden_size = SIZE, .intermediate_size = INNER, .num_heads = HEADS, .num_kv_heads = KV_HEADS, .head_dim = HEAD,
        .block_size = 16, .is_bfloat16 = is_bfloat16,
    };
    const int64_t rows[ROWS] = {0, 1, 2, 3, 4}, starts[] = {0, ROWS}, table[] = {0, 1, 2, 3}, prefix = PREFIX;
    int64_t positions[ROWS], tokens[ROWS];
    for (int i = 0; i < ROWS; i++) positions[i] = PREFIX + i, tokens[i] = i * 7;
    float *logits = calloc(ROWS * VOCABULARY, sizeof *logits);
    const Step step = {
        .logits = logits, .scratch = calloc((size_t)(ROWS * scratch_size(&model)), sizeof(float)), .token_ids = tokens,
        .logit_rows = rows, .positions = positions, .slots = positions, .row_starts = starts, .prefix_lens = &prefix,
        .block_tables = table, .num_rows = ROWS, .num_logit_rows = ROWS, .num_segments = 1, .table_len = 4, .eps = 1e-5f,
    };
    if (decode(&model, &step, 2) < 0) return 0;
    return hash(hash(h, logits, ROWS * VOCABULARY), layer.keys, is_bfloat16 ? kv / 2 : kv);
}

int main(void) {
    uint64_t first = 0;
    for (int64_t lanes = 16; lanes >= 4; lanes /= 2) {
        if (use_lanes(lanes) < 0) continue;
        state = 1;
        const uint64_t h = passes(passes(products(0xcbf29ce484222325u), 0), 1);
        if (first != 0 && h != first) printf("with %d lanes: ", (int)lanes);
        if (first != h) printf("%016llx\n", (unsigned long long)h);
        first = h;
    }
    return 0;
}
