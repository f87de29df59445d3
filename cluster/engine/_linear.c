/*
 * y = x W^T for the few rows of a decode or verify step, at the speed at which W can be read.
 *
 * oneDNN's kernels for a handful of rows are bound by arithmetic on processors without bfloat16 units, where
 * they emulate them, and lay weights out again at every call when they are not packed. Here each weight is
 * read once, widened to float32 in a register and multiplied with all rows. Every output is summed in an order
 * that depends on in_features alone, so a row's result does not depend on how many rows there are.
 *
 * Needs AVX-512 (F, BW, VL, DQ); `is_supported` asks the processor.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#define LANES 16
#define MAX_TILE_ROWS 8

typedef struct {
    const void *weight; /* [out_features, in_features], float32 or bfloat16 */
    const float *x;     /* [num_rows, in_features] */
    void *y;            /* [num_rows, out_features], the dtype of weight */
    int64_t num_rows, in_features, out_features;
    int is_bfloat16;
} Product;

INLINE __m512 load_weight(const void *weight, int64_t index, __mmask16 mask, int is_bfloat16) {
    if (!is_bfloat16) return _mm512_maskz_loadu_ps(mask, (const float *)weight + index);
    __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)weight + index);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE void store(const Product *p, int64_t row, int64_t out, float value) {
    int64_t index = row * p->out_features + out;
    if (!p->is_bfloat16) {
        ((float *)p->y)[index] = value;
        return;
    }
    union { float f; uint32_t u; } bits = {value};
    if (value != value) bits.u = 0x7fc00000u; /* rounding could turn a NaN into an infinity */
    else bits.u += 0x7fffu + ((bits.u >> 16) & 1u); /* to nearest, ties to even */
    ((uint16_t *)p->y)[index] = (uint16_t)(bits.u >> 16);
}

/* ROWS x OUTS outputs at once, their sums in registers. Both are constants after inlining. */
INLINE void tile(const Product *p, int64_t row, int64_t out, const int rows, const int outs, const int is_bfloat16) {
    __m512 sums[MAX_TILE_ROWS][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) sums[r][o] = _mm512_setzero_ps();
    const int64_t n = p->in_features;
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 mask = n - i >= LANES ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
        __m512 weights[4];
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) {
            weights[o] = load_weight(p->weight, (out + o) * n + i, mask, is_bfloat16);
            _mm_prefetch((const char *)p->weight + ((out + outs + o) * n + i) * (is_bfloat16 ? 2 : 4), _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            __m512 x = _mm512_maskz_loadu_ps(mask, p->x + (row + r) * n + i);
#pragma GCC unroll 4
            for (int o = 0; o < outs; o++) sums[r][o] = _mm512_fmadd_ps(x, weights[o], sums[r][o]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int o = 0; o < outs; o++) store(p, row + r, out + o, _mm512_reduce_add_ps(sums[r][o]));
}

INLINE void tile_of_rows(const Product *p, int64_t row, int64_t rows, int64_t out, const int outs, const int bf16) {
    switch (rows) {
        case 1: tile(p, row, out, 1, outs, bf16); break;
        case 2: tile(p, row, out, 2, outs, bf16); break;
        case 3: tile(p, row, out, 3, outs, bf16); break;
        case 4: tile(p, row, out, 4, outs, bf16); break;
        case 5: tile(p, row, out, 5, outs, bf16); break;
        case 6: tile(p, row, out, 6, outs, bf16); break;
        case 7: tile(p, row, out, 7, outs, bf16); break;
        default: tile(p, row, out, 8, outs, bf16); break;
    }
}

/* All rows of outputs [begin, end). As many outputs at a time as leave their sums in the 32 registers; across
   tiles of rows their weights stay in the first cache. */
INLINE void outputs(const Product *p, int64_t begin, int64_t end, const int bf16) {
    int64_t out = begin;
    if (p->num_rows <= 6)
        for (; out + 4 <= end; out += 4) tile_of_rows(p, 0, p->num_rows, out, 4, bf16);
    for (; out + 3 <= end; out += 3)
        for (int64_t row = 0; row < p->num_rows; row += MAX_TILE_ROWS)
            tile_of_rows(p, row, p->num_rows - row, out, 3, bf16);
    for (; out < end; out++)
        for (int64_t row = 0; row < p->num_rows; row += MAX_TILE_ROWS)
            tile_of_rows(p, row, p->num_rows - row, out, 1, bf16);
}

TARGET static void outputs_of_thread(const Product *p, int64_t begin, int64_t end) {
    if (p->is_bfloat16) outputs(p, begin, end, 1);
    else outputs(p, begin, end, 0);
}

static void multiply(const Product *p, int num_threads) {
    const int64_t block = 24, /* a multiple of 3 and 4, so that no tile is cut */
                  num_blocks = (p->out_features + block - 1) / block;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (num_threads > 1)
    for (int64_t b = 0; b < num_blocks; b++) {
        int64_t begin = b * block, end = begin + block;
        outputs_of_thread(p, begin, end < p->out_features ? end : p->out_features);
    }
}

static float *widen(const uint16_t *x, int64_t count) {
    float *wide = malloc((size_t)count * sizeof(float));
    if (wide == NULL) return NULL;
    for (int64_t i = 0; i < count; i++) ((uint32_t *)wide)[i] = (uint32_t)x[i] << 16;
    return wide;
}

static PyObject *linear(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 8) {
        PyErr_SetString(PyExc_TypeError, "linear takes 8 arguments");
        return NULL;
    }
    int64_t values[8];
    for (int i = 0; i < 8; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return NULL;
    }
    Product p = {
        .weight = (const void *)values[1], .x = (const float *)values[0], .y = (void *)values[2],
        .num_rows = values[3], .in_features = values[4], .out_features = values[5], .is_bfloat16 = (int)values[6],
    };
    float *wide = NULL;
    if (p.is_bfloat16) {
        wide = widen((const uint16_t *)values[0], p.num_rows * p.in_features);
        if (wide == NULL) return PyErr_NoMemory();
        p.x = wide;
    }
    Py_BEGIN_ALLOW_THREADS
    multiply(&p, (int)values[7]);
    Py_END_ALLOW_THREADS
    free(wide);
    Py_RETURN_NONE;
}

static PyObject *is_supported(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return PyBool_FromLong(
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"));
}

static PyMethodDef methods[] = {
    {"linear", (PyCFunction)(void (*)(void))linear, METH_FASTCALL, NULL},
    {"is_supported", is_supported, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_linear", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__linear(void) { return PyModule_Create(&definition); }
