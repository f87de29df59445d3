/* The Python face of the kernel: addresses and sizes in, nothing checked that `gumbel_max.py` has made sure of. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "sampling.h"

static PyObject *draw_(PyObject *module, PyObject *args) {
    (void)module;
    Py_buffer runs;
    long long vocab_size, width, ids, scores;
    if (!PyArg_ParseTuple(args, "y*LLLL", &runs, &vocab_size, &width, &ids, &scores)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    draw(runs.buf, runs.len / (Py_ssize_t)sizeof(Run), vocab_size, width, (int64_t *)ids, (float *)scores);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&runs);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"draw", draw_, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_sampling", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__sampling(void) { return PyModule_Create(&definition); }
