/* The Python face of the kernels: addresses and sizes in, nothing checked that `cpu_ops.py` has made sure of. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

#define MAX_ARGUMENTS 20

/* Fills `values` from `count` integers; 0, or -1 with an exception. */
static int read_integers(const char *name, PyObject *const *args, Py_ssize_t given, int count, int64_t *values) {
    if (given != count) {
        PyErr_Format(PyExc_TypeError, "%s takes %d arguments, not %zd", name, count, given);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return -1;
    }
    return 0;
}

/* The same with a number after them. */
static int read_integers_and_number(
    const char *name, PyObject *const *args, Py_ssize_t given, int count, int64_t *values, double *number) {
    if (given != count + 1) {
        PyErr_Format(PyExc_TypeError, "%s takes %d arguments, not %zd", name, count + 1, given);
        return -1;
    }
    if (read_integers(name, args, count, count, values) < 0) return -1;
    *number = PyFloat_AsDouble(args[count]);
    return *number == -1.0 && PyErr_Occurred() ? -1 : 0;
}

#define FUNCTION(name, num_integers) \
    static PyObject *name##_(PyObject *module, PyObject *const *args, Py_ssize_t given) { \
        (void)module; \
        int64_t v[MAX_ARGUMENTS]; \
        if (read_integers(#name, args, given, num_integers, v) < 0) return NULL;

#define FUNCTION_WITH_NUMBER(name, num_integers) \
    static PyObject *name##_(PyObject *module, PyObject *const *args, Py_ssize_t given) { \
        (void)module; \
        int64_t v[MAX_ARGUMENTS]; \
        double number; \
        if (read_integers_and_number(#name, args, given, num_integers, v, &number) < 0) return NULL;

FUNCTION(linear, 10)
    const Linear job = {
        .x = (const float *)v[0], .panels = (const void *)v[1], .scales = (const float *)v[2], .y = (float *)v[3],
        .num_rows = v[4], .in_features = v[5], .out_features = v[6], .group_size = v[7], .format = (Format)v[8],
    };
    Py_BEGIN_ALLOW_THREADS
    linear(&job, (int)v[9]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

FUNCTION(attention, 19)
    const Attention job = {
        .qkv = (const float *)v[0], .keys = (const void *)v[1], .values = (const void *)v[2], .y = (float *)v[3],
        .row_starts = (const int64_t *)v[4], .context_lens = (const int64_t *)v[5],
        .block_tables = (const int64_t *)v[6],
        .positions = (const int64_t *)v[7], .paths = (const int64_t *)v[8], .path_len = v[9],
        .num_segments = v[10], .table_len = v[11], .block_size = v[12],
        .num_heads = v[13], .num_kv_heads = v[14], .head_dim = v[15], .span = v[16],
        .is_bfloat16 = (int)v[17],
    };
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = attention(&job, (int)v[18]);
    Py_END_ALLOW_THREADS
    if (result < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

FUNCTION_WITH_NUMBER(add_rms_norm, 7)
    const Norm job = {
        .hidden = (float *)v[0], .delta = (const float *)v[1], .weight = (const float *)v[2], .y = (float *)v[3],
        .size = v[5], .eps = (float)number,
    };
    Py_BEGIN_ALLOW_THREADS
    add_rms_norm(&job, v[4], (int)v[6]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

FUNCTION(silu_and_mul, 5)
    const Gate job = {.x = (const float *)v[0], .y = (float *)v[1], .size = v[3]};
    Py_BEGIN_ALLOW_THREADS
    silu_and_mul(&job, v[2], (int)v[4]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

FUNCTION_WITH_NUMBER(rotate_and_store, 14)
    const Rotary job = {
        .qkv = (float *)v[0], .norm = (const float *)v[1], .cos = (const float *)v[2], .sin = (const float *)v[3],
        .positions = (const int64_t *)v[4], .slots = (const int64_t *)v[5],
        .keys = (void *)v[6], .values = (void *)v[7],
        .num_heads = v[9], .num_kv_heads = v[10], .head_dim = v[11], .is_bfloat16 = (int)v[12],
        .eps = (float)number,
    };
    Py_BEGIN_ALLOW_THREADS
    rotate_and_store(&job, v[8], (int)v[13]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *is_supported(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    return PyBool_FromLong(
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"));
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name##_, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD(linear), METHOD(attention), METHOD(add_rms_norm), METHOD(silu_and_mul), METHOD(rotate_and_store),
    {"is_supported", is_supported, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&definition); }
