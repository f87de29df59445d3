/* A whole forward pass, without going back to Python in between. */
#include <string.h>

#include "instruction_sets.h"

static int64_t qkv_size(const Model *m) { return (m->num_heads + 2 * m->num_kv_heads) * m->head_dim; }

/* Scratch memory of the widest product. */
static int64_t product_scratch_size(const Model *m) {
    int64_t most = linear_scratch_size(&m->head);
    for (int64_t i = 0; i < m->num_layers; i++) {
        const Weight *weights[] = {&m->layers[i].qkv, &m->layers[i].output, &m->layers[i].gate_up, &m->layers[i].down};
        for (int w = 0; w < 4; w++) {
            const int64_t size = linear_scratch_size(weights[w]);
            if (size > most) most = size;
        }
    }
    return most;
}

int64_t scratch_size(const Model *m) {
    /* the products' own; hidden, normed and delta; queries, keys, values and what was attended to; gate and up, and
       their product */
    return product_scratch_size(m) + 3 * m->hidden_size + qkv_size(m) + m->num_heads * m->head_dim + 3 * m->intermediate_size;
}

/* The products of a step; their scratch memory is at the beginning of the step's. */
static void project(const Step *s, const Weight *weight, const float *x, float *y, int64_t num_rows, int num_threads) {
    const Linear job = {x, weight, y, s->scratch, num_rows};
    linear(&job, num_threads);
}

static void embed(const Model *m, const Step *s, float *hidden) {
    const int64_t size = m->hidden_size;
    for (int64_t row = 0; row < s->num_rows; row++)
        portable->widen(m->embedding, s->token_ids[row] * size, size, (int)m->is_bfloat16, hidden + row * size);
}

/* Stores x, the states after `layer` layers, in the slots of the rows, if the model captures these states. */
static void capture(const Model *m, const Step *s, const float *x, int64_t layer) {
    const int64_t size = m->hidden_size;
    for (int64_t place = 0; place < m->num_captured; place++) {
        if (m->captured_layers[place] != layer) continue;
        for (int64_t row = 0; row < s->num_rows; row++) {
            const int64_t index = (s->slots[row] * m->num_captured + place) * size;
            portable->narrow(x + row * size, size, (int)m->is_bfloat16, m->states, index);
        }
    }
}

static int captures_end(const Model *m) {
    for (int64_t place = 0; place < m->num_captured; place++)
        if (m->captured_layers[place] == m->num_layers || m->captured_layers[place] == AFTER_NORM) return 1;
    return 0;
}

/* Moves the rows whose logits are wanted to the beginning; they are in ascending order. */
static void keep_logit_rows(const Model *m, const Step *s, float *x) {
    const int64_t size = m->hidden_size;
    for (int64_t i = 0; i < s->num_logit_rows; i++)
        memmove(x + i * size, x + s->logit_rows[i] * size, (size_t)size * sizeof(float));
}

/* Norms what a product has computed, before it is added, if the model does so. */
static void norm_delta(const Model *m, const Step *s, const float *weight, float *delta, int num_threads) {
    const Norm norm = {delta, NULL, weight, delta, m->hidden_size, s->eps};
    if (weight != NULL) portable->add_rms_norm(&norm, s->num_rows, num_threads);
}

int decode(const Model *m, const Step *s, int num_threads) {
    const int64_t n = s->num_rows, size = m->hidden_size;
    float *hidden = s->scratch + n * product_scratch_size(m), *normed = hidden + n * size, *delta = normed + n * size;
    float *qkv = delta + n * size, *attended = qkv + n * qkv_size(m), *gate_up = attended + n * m->num_heads * m->head_dim;
    float *product = gate_up + n * 2 * m->intermediate_size;
    if (s->residual == NULL)
        embed(m, s, hidden);
    else
        memcpy(hidden, s->residual, (size_t)(n * size) * sizeof(float));
    for (int64_t i = 0; i < m->num_layers; i++) {
        const Layer *l = &m->layers[i];
        const float *attention_input = normed;
        if (i == 0 && s->attention_input != NULL) {
            attention_input = s->attention_input;
        } else {
            const Norm input_norm = {hidden, i > 0 ? delta : NULL, l->input_norm, normed, size, s->eps};
            portable->add_rms_norm(&input_norm, n, num_threads);
        }
        capture(m, s, hidden, i);
        project(s, &l->qkv, attention_input, qkv, n, num_threads);
        const Rotary rotary = {
            .qkv = qkv, .norm = l->qk_norm, .cos = l->cos, .sin = l->sin, .positions = s->positions, .slots = s->slots,
            .keys = l->keys, .values = l->values, .num_heads = m->num_heads, .num_kv_heads = m->num_kv_heads,
            .head_dim = m->head_dim, .is_bfloat16 = (int)m->is_bfloat16, .eps = s->eps,
        };
        portable->rotate_and_store(&rotary, n, num_threads);
        const Attention attend = {
            .qkv = qkv, .keys = l->keys, .values = l->values, .y = attended, .row_starts = s->row_starts,
            .prefix_lens = s->prefix_lens, .block_tables = s->block_tables, .positions = s->positions,
            .paths = s->paths, .path_len = s->path_len, .num_segments = s->num_segments, .table_len = s->table_len,
            .block_size = m->block_size, .num_heads = m->num_heads, .num_kv_heads = m->num_kv_heads,
            .head_dim = m->head_dim, .span = l->span, .is_bfloat16 = (int)m->is_bfloat16,
            .instruction_set = l->qkv.instruction_set,
        };
        if (attention(&attend, num_threads) < 0) return -1;
        project(s, &l->output, attended, delta, n, num_threads);
        norm_delta(m, s, l->output_norm, delta, num_threads);
        const Norm post_attention_norm = {hidden, delta, l->post_attention_norm, normed, size, s->eps};
        portable->add_rms_norm(&post_attention_norm, n, num_threads);
        project(s, &l->gate_up, normed, gate_up, n, num_threads);
        const Gate gate = {gate_up, product, m->intermediate_size, (int)m->is_gelu};
        portable->gate_and_multiply(&gate, n, num_threads);
        project(s, &l->down, product, delta, n, num_threads);
        norm_delta(m, s, l->down_norm, delta, num_threads);
    }
    const Norm norm = {hidden, m->num_layers > 0 ? delta : NULL, m->norm, normed, size, s->eps};
    if (captures_end(m)) {
        portable->add_rms_norm(&norm, n, num_threads);
        capture(m, s, hidden, m->num_layers);
        capture(m, s, normed, AFTER_NORM);
        keep_logit_rows(m, s, normed);
    } else {
        keep_logit_rows(m, s, hidden);
        keep_logit_rows(m, s, delta);
        portable->add_rms_norm(&norm, s->num_logit_rows, num_threads);
    }
    project(s, &m->head, normed, s->logits, s->num_logit_rows, num_threads);
    return 0;
}
