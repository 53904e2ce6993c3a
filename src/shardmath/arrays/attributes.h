/* How compiled code reads the arrays of a library: by attributes and methods, which the library names once.
 *
 * See `Attributes` in base.py. Arrays of other types, and arrays for which a named fact is true that only Python
 * understands, are left to Python. No function here keeps a reference to an array.
 */
#ifndef SHARDMATH_ATTRIBUTES_H
#define SHARDMATH_ATTRIBUTES_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_STEPS = 3, MOST_SPECIAL = 4, MOST_LIBRARIES = 8 };

/* The way from an array to one of its facts: "data.ptr", or "data_ptr()" for a method. Without steps it is missing. */
typedef struct {
    int count;
    struct {
        PyObject *name;
        int is_method;
    } step[MOST_STEPS];
} Path;

typedef struct {
    PyTypeObject *type;
    Path shape, dtype, address, strides, device, on_gpu, contiguous, special[MOST_SPECIAL];
    int specials;
} Attributes;

typedef struct {
    int count;
    Attributes of[MOST_LIBRARIES];
} Libraries;

/* What is at the end of a path, a new reference. */
static inline PyObject *at(const Path *path, PyObject *x) {
    PyObject *found = Py_NewRef(x);
    for (int i = 0; found != NULL && i < path->count; i++) {
        PyObject *owner = found, *name = path->step[i].name;
        found = path->step[i].is_method ? PyObject_CallMethodNoArgs(owner, name) : PyObject_GetAttr(owner, name);
        Py_DECREF(owner);
    }
    return found;
}

/* The truth of what is there: 1, 0, or -1 with an exception. */
static inline int truth_at(const Path *path, PyObject *x) {
    PyObject *found = at(path, x);
    int is_true = found == NULL ? -1 : found == Py_True ? 1 : found == Py_False ? 0 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return is_true;
}

/* The number that is there; -1 with an exception. */
static inline int64_t number_at(const Path *path, PyObject *x) {
    PyObject *found = at(path, x);
    int64_t number = found == NULL ? -1 : PyLong_AsLongLong(found);
    Py_XDECREF(found);
    return number;
}

/* Whether Python has to look at an array, since a special fact about it is true: 1, 0, or -1 with an exception. */
static inline int is_special(const Attributes *attributes, PyObject *x) {
    int is = 0;
    for (int i = 0; is == 0 && i < attributes->specials; i++)
        is = truth_at(attributes->special + i, x);
    return is;
}

/* A number for the device of an array, another for each GPU and each kind of device; with an exception, any. Where a
 * library names no such fact, all of its arrays are on GPUs. */
static inline int64_t device_of(const Attributes *attributes, PyObject *x) {
    int on_gpu = attributes->on_gpu.count ? truth_at(&attributes->on_gpu, x) : 1;
    return on_gpu < 0 ? -1 : 2 * number_at(&attributes->device, x) + on_gpu;
}

/* Whether a shape is a tuple without an extent of 0. */
static inline int has_elements(PyObject *shape) {
    int has = PyTuple_Check(shape);
    for (Py_ssize_t i = 0; has && i < PyTuple_GET_SIZE(shape); i++)
        has = PyLong_AsLong(PyTuple_GET_ITEM(shape, i)) > 0;
    return has;
}

static inline void forget_attributes(Attributes *attributes) {
    const Path *single[] = {&attributes->shape, &attributes->dtype, &attributes->address, &attributes->strides,
                            &attributes->device, &attributes->on_gpu, &attributes->contiguous};
    enum { SINGLE = sizeof single / sizeof *single };
    for (int number = 0; number < SINGLE + MOST_SPECIAL; number++) {
        const Path *path = number < SINGLE ? single[number] : attributes->special + number - SINGLE;
        for (int i = 0; i < path->count; i++)
            Py_DECREF(path->step[i].name);
    }
    Py_XDECREF(attributes->type);
    memset(attributes, 0, sizeof *attributes);
}

/* Read a path from its text. */
static inline int read_path(PyObject *given, Path *path) {
    Py_ssize_t length = 0;
    const char *text = PyUnicode_Check(given) ? PyUnicode_AsUTF8AndSize(given, &length) : NULL;
    while (text != NULL && *text != 0 && path->count < MOST_STEPS) {
        size_t whole = strcspn(text, "."), name = strcspn(text, ".(");
        int is_method = whole == name + 2 && strncmp(text + name, "()", 2) == 0;
        if (name == 0 || (!is_method && whole != name))
            break;
        PyObject *one = PyUnicode_FromStringAndSize(text, (Py_ssize_t)name);
        if (one == NULL)
            return -1;
        PyUnicode_InternInPlace(&one);
        path->step[path->count].name = one;
        path->step[path->count++].is_method = is_method;
        text += whole + (text[whole] == '.');
    }
    if (text != NULL && *text == 0)
        return 0;
    PyErr_Format(PyExc_ValueError, "a path is like data.ptr or data_ptr(), not %R", given);
    return -1;
}

/* Read a library's `Attributes`. They are empty if that raises. */
static inline int read_attributes(PyObject *given, Attributes *made) {
    PyObject *type, *address, *strides, *device, *on_gpu, *contiguous, *special, *stream, *like;
    memset(made, 0, sizeof *made);
    if (!PyTuple_Check(given) ||
        !PyArg_ParseTuple(given, "O!OOOOOO!OO", &PyType_Type, &type, &address, &strides, &device, &on_gpu,
                          &contiguous, &PyTuple_Type, &special, &stream, &like)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "the attributes of a library are a tuple");
        return -1;
    }
    PyObject *shape = PyUnicode_FromString("shape"), *dtype = PyUnicode_FromString("dtype");
    made->type = (PyTypeObject *)Py_NewRef(type);
    int failed = shape == NULL || dtype == NULL || read_path(shape, &made->shape) < 0 ||
                 read_path(dtype, &made->dtype) < 0 || read_path(address, &made->address) < 0 ||
                 read_path(strides, &made->strides) < 0 || read_path(device, &made->device) < 0 ||
                 read_path(on_gpu, &made->on_gpu) < 0 || read_path(contiguous, &made->contiguous) < 0;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(special); i++) {
        failed = i == MOST_SPECIAL || read_path(PyTuple_GET_ITEM(special, i), made->special + i) < 0;
        made->specials = (int)i + 1;
        if (failed && !PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "too many special facts");
    }
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    if (failed)
        forget_attributes(made);
    return failed ? -1 : 0;
}

/* How to read arrays of this type; NULL if Python has to. */
static inline const Attributes *attributes_of(const Libraries *libraries, PyTypeObject *type) {
    for (int i = 0; i < libraries->count; i++)
        if (libraries->of[i].type == type)
            return libraries->of + i;
    return NULL;
}

/* Note how to read the arrays of one more library; without effect for a type that is known already. */
static inline int know_library(Libraries *libraries, PyObject *given) {
    Attributes made;
    if (read_attributes(given, &made) < 0)
        return -1;
    if (attributes_of(libraries, made.type) != NULL || libraries->count == MOST_LIBRARIES)
        forget_attributes(&made);
    else
        libraries->of[libraries->count++] = made;
    return 0;
}

#endif
