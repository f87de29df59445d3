/* The operations between the products of a layer. A task has one row. */

/* Root mean square norm (Zhang, Sennrich, arXiv 1910.07467, equation 4); y may be x. */
INLINE void rms_norm(const float *x, const float *weight, int64_t size, float eps, float *y) {
    Vector squares = all(0);
    for (int64_t i = 0; i < size; i += LANES) {
        const Vector part = load_first(x + i, size - i);
        squares = fma_v(part, part, squares);
    }
    const Vector scale = all(1.0f / sqrtf(sum_of_lanes(squares) / (float)size + eps));
    for (int64_t i = 0; i < size; i += LANES) {
        const Vector normed = multiply(load_first(x + i, size - i), scale);
        store_first(y + i, size - i, multiply(normed, load_first(weight + i, size - i)));
    }
}

static TARGET void add_rms_norm_row(const void *job, int64_t row) {
    const Norm *n = job;
    float *hidden = n->hidden + row * n->size;
    for (int64_t i = 0; n->delta != NULL && i < n->size; i += LANES) {
        const Vector delta = load_first(n->delta + row * n->size + i, n->size - i);
        store_first(hidden + i, n->size - i, add(load_first(hidden + i, n->size - i), delta));
    }
    if (n->weight == NULL)
        memcpy(n->y + row * n->size, hidden, (size_t)n->size * sizeof(float));
    else
        rms_norm(hidden, n->weight, n->size, n->eps, n->y + row * n->size);
}

static void add_rms_norm_portable(const Norm *norm, int64_t num_rows, int num_threads) {
    parallel_for(add_rms_norm_row, norm, num_rows, useful_threads(num_rows, norm->size, num_threads));
}

/* Gated SiLU or GELU (Shazeer, arXiv 2002.05202). GELU by tanh (Hendrycks, Gimpel, arXiv 1606.08415) is
   x * sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x^3)). */
static TARGET void gate_and_multiply_row(const void *job, int64_t row) {
    const Gate *g = job;
    const float *x = g->x + row * 2 * g->size;
    for (int64_t i = 0; i < g->size; i += LANES) {
        const Vector gate = load_first(x + i, g->size - i), up = load_first(x + g->size + i, g->size - i);
        Vector logit = gate;
        if (g->is_gelu)
            logit = multiply(all(1.5957691216f), fma_v(multiply(gate, gate), multiply(all(0.044715f), gate), gate));
        const Vector activated = quotient(gate, add(all(1), exp_v(negative(logit))));
        store_first(g->y + row * g->size + i, g->size - i, multiply(activated, up));
    }
}

static void gate_and_multiply_portable(const Gate *gate, int64_t num_rows, int num_threads) {
    parallel_for(gate_and_multiply_row, gate, num_rows, useful_threads(num_rows, 4 * gate->size, num_threads));
}

/* Rotary embedding by halves (Su et al., arXiv 2104.09864, equation 34) of one head. */
INLINE void rotate(const float *cos, const float *sin, int64_t half, float *x) {
    for (int64_t i = 0; i < half; i += LANES) {
        const Vector c = load_first(cos + i, half - i), s = load_first(sin + i, half - i);
        const Vector first = load_first(x + i, half - i), second = load_first(x + half + i, half - i);
        store_first(x + i, half - i, fma_v(first, c, negative(multiply(second, s))));
        store_first(x + half + i, half - i, fma_v(second, c, multiply(first, s)));
    }
}

static TARGET void rotate_and_store_row(const void *job, int64_t row) {
    const Rotary *r = job;
    const int64_t head_dim = r->head_dim, half = head_dim / 2;
    float *heads = r->qkv + row * (r->num_heads + 2 * r->num_kv_heads) * head_dim;
    const float *cos = r->cos + r->positions[row] * half, *sin = r->sin + r->positions[row] * half;
    for (int64_t h = 0; h < r->num_heads + r->num_kv_heads; h++) {
        float *head = heads + h * head_dim;
        if (r->norm != NULL) rms_norm(head, r->norm + h * head_dim, head_dim, r->eps, head);
        rotate(cos, sin, half, head);
    }
    const float *keys = heads + r->num_heads * head_dim, *values = keys + r->num_kv_heads * head_dim;
    const int64_t size = r->num_kv_heads * head_dim, index = r->slots[row] * size;
    for (int64_t i = 0; i < size; i += LANES) {
        store_any(r->keys, index + i, size - i, load_first(keys + i, size - i), r->is_bfloat16);
        store_any(r->values, index + i, size - i, load_first(values + i, size - i), r->is_bfloat16);
    }
}

static void rotate_and_store_portable(const Rotary *rotary, int64_t num_rows, int num_threads) {
    const int64_t size = (rotary->num_heads + 2 * rotary->num_kv_heads) * rotary->head_dim;
    parallel_for(rotate_and_store_row, rotary, num_rows, useful_threads(num_rows, size, num_threads));
}

static TARGET void widen_portable(const void *array, int64_t index, int64_t count, int is_bfloat16, float *to) {
    for (int64_t i = 0; i < count; i += LANES)
        store_first(to + i, count - i, load_any(array, index + i, count - i, is_bfloat16));
}

static TARGET void narrow_portable(const float *from, int64_t count, int is_bfloat16, void *array, int64_t index) {
    for (int64_t i = 0; i < count; i += LANES)
        store_any(array, index + i, count - i, load_first(from + i, count - i), is_bfloat16);
}
