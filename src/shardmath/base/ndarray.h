/* NumPy's arrays as all of its versions since 1.0 lay them out, which is a part of its binary interface. */
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
