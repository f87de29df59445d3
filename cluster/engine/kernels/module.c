/* The Python face of the kernels: addresses and sizes in. Nothing is checked that `cpu_linear.py` and `cpu_model.py`
   have made sure of. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "kernels.h"

#define MAX_ARGUMENTS 17

/* Fills `values` from `count` integers, and `number` from what follows them; 0, or -1 with an exception. */
static int read_arguments(
    const char *name, PyObject *const *args, Py_ssize_t given, int count, int64_t *values, double *number) {
    const int wanted = count + (number != NULL);
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "%s takes %d arguments, not %zd", name, wanted, given);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        values[i] = PyLong_AsLongLong(args[i]);
        if (values[i] == -1 && PyErr_Occurred()) return -1;
    }
    if (number == NULL) return 0;
    *number = PyFloat_AsDouble(args[count]);
    return *number == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static PyObject *linear_(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    int64_t v[MAX_ARGUMENTS];
    if (read_arguments("linear", args, given, 6, v, NULL) < 0) return NULL;
    const Linear job = {(const float *)v[0], (const Weight *)v[1], (float *)v[2], (float *)v[3], v[4]};
    Py_BEGIN_ALLOW_THREADS
    linear(&job, (int)v[5]);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *decode_(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    int64_t v[MAX_ARGUMENTS];
    double eps;
    if (read_arguments("decode", args, given, 17, v, &eps) < 0) return NULL;
    const Step step = {
        .logits = (float *)v[1], .scratch = (float *)v[2], .token_ids = (const int64_t *)v[3],
        .logit_rows = (const int64_t *)v[4], .positions = (const int64_t *)v[5], .slots = (const int64_t *)v[6],
        .row_starts = (const int64_t *)v[7], .prefix_lens = (const int64_t *)v[8],
        .block_tables = (const int64_t *)v[9], .paths = (const int64_t *)v[10], .num_rows = v[11],
        .num_logit_rows = v[12], .num_segments = v[13], .table_len = v[14], .path_len = v[15], .eps = (float)eps,
    };
    int result;
    Py_BEGIN_ALLOW_THREADS
    result = decode((const Model *)v[0], &step, (int)v[16]);
    Py_END_ALLOW_THREADS
    if (result < 0) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *scratch_size_(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    int64_t model;
    if (read_arguments("scratch_size", args, given, 1, &model, NULL) < 0) return NULL;
    return PyLong_FromLongLong(scratch_size((const Model *)model));
}

static PyObject *linear_scratch_size_(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    int64_t weight;
    if (read_arguments("linear_scratch_size", args, given, 1, &weight, NULL) < 0) return NULL;
    return PyLong_FromLongLong(linear_scratch_size((const Weight *)weight));
}

static PyObject *is_supported_(PyObject *module, PyObject *const *args, Py_ssize_t given) {
    (void)module;
    int64_t set;
    if (read_arguments("is_supported", args, given, 1, &set, NULL) < 0) return NULL;
    return PyBool_FromLong(is_supported((InstructionSet)set));
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name##_, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    METHOD(linear), METHOD(linear_scratch_size), METHOD(decode), METHOD(scratch_size), METHOD(is_supported),
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&definition); }
