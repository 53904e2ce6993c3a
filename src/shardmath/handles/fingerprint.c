/* Fingerprints of all arrays of a call, by which repeated calls recognise them.
 *
 * Built at installation where there is a C compiler; without it fingerprint.py does the same. This handles plain arrays
 * of NumPy and of libraries that have `Attributes`; arrays of other types, and those without elements, are left to
 * `other`, a Python function. Invariant: two fingerprints are equal only where library, type, shape, strides, device,
 * address and writability are; and no reference to an array is kept.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#include "../arrays/attributes.h"

/* NumPy's struct in the capsule of `__array_struct__`, as documented. */
typedef struct {
    int two, nd;
    char typekind;
    int itemsize, flags;
    Py_ssize_t *shape, *strides;
    void *data;
    PyObject *descr;
} ArrayInterface;

typedef struct {
    PyTypeObject *ndarray;
    Libraries libraries;
} State;

enum { MOST_AXES = 64 };
static PyObject *s_dtype, *s_array_struct;

/* Append an object, whose reference is stolen. 1, or -1 with an exception. */
static int append(PyObject *list, PyObject *item) {
    int failed = item == NULL || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 1;
}

static int append_array(PyObject *list, PyObject *x) {
    PyObject *capsule = PyObject_GetAttr(x, s_array_struct);
    if (capsule == NULL)
        return -1;
    int64_t words[2 + 2 * MOST_AXES];
    int count = 0, found = 0;
    const ArrayInterface *inter = PyCapsule_GetPointer(capsule, NULL);
    if (inter != NULL && inter->nd <= MOST_AXES) {
        found = 1;
        words[count++] = (int64_t)(intptr_t)inter->data;
        words[count++] = inter->flags;
        for (int i = 0; i < inter->nd; i++) {
            words[count++] = inter->shape[i];
            words[count++] = inter->strides[i];
            found = found && inter->shape[i] > 0;
        }
    }
    Py_DECREF(capsule);
    if (!found)
        return PyErr_Occurred() ? -1 : 0;
    found = append(list, PyBytes_FromStringAndSize((const char *)words, count * (int)sizeof(words[0])));
    return found < 0 ? found : append(list, PyObject_GetAttr(x, s_dtype));
}

/* The address comes first: direct.c finds by it where a new result lies. */
static int append_by_attributes(const Attributes *attributes, PyObject *list, PyObject *x) {
    int special = is_special(attributes, x);
    if (special)
        return special < 0 ? -1 : 0;
    PyObject *address = at(&attributes->address, x), *shape = address == NULL ? NULL : at(&attributes->shape, x);
    if (shape == NULL || PyObject_IsTrue(address) != 1 || !has_elements(shape)) {
        Py_XDECREF(address);
        Py_XDECREF(shape);
        return PyErr_Occurred() ? -1 : 0; /* it has no elements, or only stands for other arrays */
    }
    int appended = append(list, address);
    if (append(list, shape) < 0 || appended < 0 || append(list, Py_NewRef(attributes->type)) < 0 ||
        append(list, at(&attributes->strides, x)) < 0 ||
        append(list, at(&attributes->dtype, x)) < 0)
        return -1;
    int64_t device = device_of(attributes, x);
    return PyErr_Occurred() ? -1 : append(list, PyLong_FromLongLong(device));
}

/* 1 where the fingerprint of the array was appended, 0 where the call has to check it, -1 with an exception. */
static int look_at(const State *state, PyObject *list, PyObject *x, PyObject *other) {
    const Attributes *attributes;
    int found = 0;
    if (x == Py_None)
        return append(list, Py_NewRef(x));
    if (Py_TYPE(x) == state->ndarray)
        found = append_array(list, x);
    else if ((attributes = attributes_of(&state->libraries, Py_TYPE(x))) != NULL)
        found = append_by_attributes(attributes, list, x);
    if (found == 0) {
        PyObject *said = PyObject_CallOneArg(other, x);
        if (said == Py_None) {
            Py_DECREF(said);
            return 0;
        }
        found = append(list, said);
    }
    return found;
}

/* looks(other, arrays, ...): the fingerprints of tuples of arrays; None where the call has to check one. */
static PyObject *looks(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    const State *state = PyModule_GetState(module);
    PyObject *list = PyList_New(0), *found = NULL;
    int known = list == NULL ? -1 : 1;
    for (Py_ssize_t i = 1; known > 0 && i < count; i++) {
        if (!PyTuple_Check(given[i])) {
            PyErr_SetString(PyExc_TypeError, "looks(other, tuple of arrays, ...)");
            known = -1;
        }
        for (Py_ssize_t j = 0; known > 0 && j < PyTuple_GET_SIZE(given[i]); j++)
            known = look_at(state, list, PyTuple_GET_ITEM(given[i], j), given[0]);
    }
    if (known > 0)
        found = PyList_AsTuple(list);
    else if (known == 0)
        found = Py_NewRef(Py_None);
    Py_XDECREF(list);
    return found;
}

/* know(ndarray, attributes, ...): the type of NumPy's arrays, and how to read those of other libraries. */
static PyObject *know(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    State *state = PyModule_GetState(module);
    if (count < 1 || !PyType_Check(given[0])) {
        PyErr_SetString(PyExc_TypeError, "know(ndarray, attributes, ...)");
        return NULL;
    }
    Py_XSETREF(state->ndarray, (PyTypeObject *)Py_NewRef(given[0]));
    for (Py_ssize_t i = 1; i < count; i++)
        if (know_library(&state->libraries, given[i]) < 0)
            return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"looks", (PyCFunction)(void (*)(void))looks, METH_FASTCALL,
     "The fingerprints of the arrays of a call; None where the call has to check one."},
    {"know", (PyCFunction)(void (*)(void))know, METH_FASTCALL, "Tell how to read plain arrays."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fingerprint", "Fingerprints of arrays, compiled.", sizeof(State), methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fingerprint(void) {
    s_dtype = PyUnicode_InternFromString("dtype");
    s_array_struct = PyUnicode_InternFromString("__array_struct__");
    PyObject *module = s_dtype == NULL || s_array_struct == NULL ? NULL : PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", 1) < 0) /* as compiled.py has it */
        Py_CLEAR(module);
    return module;
}
