/* The layout of NumPy's arrays, which is part of its binary interface and the same since version 1.0. */
#ifndef SHARDMATH_NDARRAY_H
#define SHARDMATH_NDARRAY_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct {
    PyObject_HEAD
    char *data;
    int axes;
    Py_ssize_t *shape, *strides;
    PyObject *base, *dtype;
    int flags;
} NDArray;

#endif
