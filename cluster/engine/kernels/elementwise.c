/* What lies between the products of a layer, a row a task. */
#include <math.h>
#include <string.h>

#include "kernels.h"

/* Root mean square norm (Zhang, Sennrich, arXiv 1910.07467, equation 4); y may be x. */
INLINE void rms_norm(const float *x, const float *weight, int64_t size, float eps, float *y) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += LANES) {
        __m512 part = _mm512_maskz_loadu_ps(first_lanes(size - i), x + i);
        squares = _mm512_fmadd_ps(part, part, squares);
    }
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)size + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        __mmask16 mask = first_lanes(size - i);
        __m512 normed = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), scale);
        _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(normed, _mm512_maskz_loadu_ps(mask, weight + i)));
    }
}

TARGET static void add_rms_norm_row(const void *job, int64_t row) {
    const Norm *n = job;
    float *hidden = n->hidden + row * n->size;
    for (int64_t i = 0; n->delta != NULL && i < n->size; i += LANES) {
        __mmask16 mask = first_lanes(n->size - i);
        __m512 delta = _mm512_maskz_loadu_ps(mask, n->delta + row * n->size + i);
        _mm512_mask_storeu_ps(hidden + i, mask, _mm512_add_ps(_mm512_maskz_loadu_ps(mask, hidden + i), delta));
    }
    if (n->weight == NULL)
        memcpy(n->y + row * n->size, hidden, (size_t)n->size * sizeof(float));
    else
        rms_norm(hidden, n->weight, n->size, n->eps, n->y + row * n->size);
}

void add_rms_norm(const Norm *norm, int64_t num_rows, int num_threads) {
    parallel_for(add_rms_norm_row, norm, num_rows, useful_threads(num_rows, norm->size, num_threads));
}

TARGET static void silu_and_mul_row(const void *job, int64_t row) {
    const Gate *g = job;
    const float *x = g->x + row * 2 * g->size;
    const __m512 one = _mm512_set1_ps(1.0f);
    for (int64_t i = 0; i < g->size; i += LANES) {
        __mmask16 mask = first_lanes(g->size - i);
        __m512 gate = _mm512_maskz_loadu_ps(mask, x + i), up = _mm512_maskz_loadu_ps(mask, x + g->size + i);
        __m512 decay = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), gate));
        __m512 silu = _mm512_div_ps(gate, _mm512_add_ps(one, decay));
        _mm512_mask_storeu_ps(g->y + row * g->size + i, mask, _mm512_mul_ps(silu, up));
    }
}

void silu_and_mul(const Gate *gate, int64_t num_rows, int num_threads) {
    parallel_for(silu_and_mul_row, gate, num_rows, useful_threads(num_rows, 4 * gate->size, num_threads));
}

/* Rotary embedding by halves (Su et al., arXiv 2104.09864, equation 34) of one head. */
INLINE void rotate(const float *x, const float *cos, const float *sin, int64_t half, float *y) {
    for (int64_t i = 0; i < half; i += LANES) {
        __mmask16 mask = first_lanes(half - i);
        __m512 c = _mm512_maskz_loadu_ps(mask, cos + i), s = _mm512_maskz_loadu_ps(mask, sin + i);
        __m512 first = _mm512_maskz_loadu_ps(mask, x + i), second = _mm512_maskz_loadu_ps(mask, x + half + i);
        _mm512_mask_storeu_ps(y + i, mask, _mm512_fmsub_ps(first, c, _mm512_mul_ps(second, s)));
        _mm512_mask_storeu_ps(y + half + i, mask, _mm512_fmadd_ps(second, c, _mm512_mul_ps(first, s)));
    }
}

TARGET static void rotate_and_store_row(const void *job, int64_t row) {
    const Rotary *r = job;
    const int64_t head_dim = r->head_dim, half = head_dim / 2;
    float *heads = r->qkv + row * (r->num_heads + 2 * r->num_kv_heads) * head_dim;
    const float *cos = r->cos + r->positions[row] * half, *sin = r->sin + r->positions[row] * half;
    for (int64_t h = 0; h < r->num_heads + r->num_kv_heads; h++) {
        float *head = heads + h * head_dim;
        if (r->norm != NULL) rms_norm(head, r->norm + h * head_dim, head_dim, r->eps, head);
        rotate(head, cos, sin, half, head);
    }
    const float *keys = heads + r->num_heads * head_dim, *values = keys + r->num_kv_heads * head_dim;
    const int64_t size = r->num_kv_heads * head_dim, index = r->slots[row] * size;
    for (int64_t i = 0; i < size; i += LANES) {
        __mmask16 mask = first_lanes(size - i);
        store(r->keys, index + i, mask, _mm512_maskz_loadu_ps(mask, keys + i), r->is_bfloat16);
        store(r->values, index + i, mask, _mm512_maskz_loadu_ps(mask, values + i), r->is_bfloat16);
    }
}

void rotate_and_store(const Rotary *rotary, int64_t num_rows, int num_threads) {
    const int64_t size = (rotary->num_heads + 2 * rotary->num_kv_heads) * rotary->head_dim;
    parallel_for(rotate_and_store_row, rotary, num_rows, useful_threads(num_rows, size, num_threads));
}
