/* Fingerprints of all arrays of a call, by which repeated calls recognise them.
 *
 * Built at installation where there is a C compiler; without it fingerprint.py does the same. This handles plain
 * ndarrays and tensors; arrays of other types, and those without elements, are left to `other`, a Python function.
 * Invariant: two fingerprints are equal only where library, type, shape, strides, device, address and writability are;
 * and no reference to an array is kept.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

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
    PyTypeObject *ndarray, *tensor;
    PyObject *records; /* torch.is_grad_enabled */
} State;

enum { MOST_AXES = 64 };
enum { DTYPE, ARRAY_STRUCT, DEVICE, LAYOUT, SHAPE, STRIDE, DATA_PTR, REQUIRES_GRAD, LAZY };
static const char *const texts[] = {"dtype", "__array_struct__", "device", "layout", "shape",
                                    "stride", "data_ptr", "requires_grad"};
static PyObject *names[LAZY], *is_conj, *is_neg;

/* Append an object, whose reference is stolen. 1, or -1 with an exception. */
static int append(PyObject *list, PyObject *item) {
    int failed = item == NULL || PyList_Append(list, item) < 0;
    Py_XDECREF(item);
    return failed ? -1 : 1;
}

static int append_array(PyObject *list, PyObject *x) {
    PyObject *capsule = PyObject_GetAttr(x, names[ARRAY_STRUCT]);
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
    return found < 0 ? found : append(list, PyObject_GetAttr(x, names[DTYPE]));
}

/* The truth of an object, whose reference is stolen; -1 with an exception. */
static int is_true(PyObject *value) {
    int found = value == NULL ? -1 : PyObject_IsTrue(value);
    Py_XDECREF(value);
    return found;
}

static int append_tensor(const State *state, PyObject *list, PyObject *x) {
    int lazy = is_true(PyObject_CallMethodNoArgs(x, is_conj));
    if (!lazy)
        lazy = is_true(PyObject_CallMethodNoArgs(x, is_neg));
    if (lazy)
        return lazy < 0 ? -1 : 0;
    int learnt = is_true(PyObject_GetAttr(x, names[REQUIRES_GRAD]));
    if (learnt > 0)
        learnt = is_true(PyObject_CallNoArgs(state->records));
    if (learnt)
        return learnt < 0 ? -1 : 0;
    PyObject *address = PyObject_CallMethodNoArgs(x, names[DATA_PTR]);
    int there = address == NULL ? -1 : PyObject_IsTrue(address);
    if (there <= 0) { /* it has no elements, or only stands for other tensors */
        Py_XDECREF(address);
        return there;
    }
    if (append(list, address) < 0 || append(list, PyObject_CallMethodNoArgs(x, names[STRIDE])) < 0)
        return -1;
    for (int i = 0; i < DATA_PTR; i++)
        if (i != ARRAY_STRUCT && i != STRIDE && append(list, PyObject_GetAttr(x, names[i])) < 0)
            return -1;
    return 1;
}

/* 1 where the fingerprint of the array was appended, 0 where the call has to check it, -1 with an exception. */
static int look_at(const State *state, PyObject *list, PyObject *x, PyObject *other) {
    int found = 0;
    if (x == Py_None)
        return append(list, Py_NewRef(x));
    if (Py_TYPE(x) == state->ndarray)
        found = append_array(list, x);
    else if (Py_TYPE(x) == state->tensor)
        found = append_tensor(state, list, x);
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

/* know(ndarray) or know(Tensor, is_grad_enabled): the types of plain arrays. */
static PyObject *know(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    State *state = PyModule_GetState(module);
    if (count < 1 || count > 2 || !PyType_Check(given[0])) {
        PyErr_SetString(PyExc_TypeError, "know(ndarray), or know(Tensor, is_grad_enabled)");
        return NULL;
    }
    if (count == 1)
        Py_XSETREF(state->ndarray, (PyTypeObject *)Py_NewRef(given[0]));
    else {
        Py_XSETREF(state->records, Py_NewRef(given[1]));
        Py_XSETREF(state->tensor, (PyTypeObject *)Py_NewRef(given[0]));
    }
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"looks", (PyCFunction)(void (*)(void))looks, METH_FASTCALL,
     "The fingerprints of the arrays of a call; None where the call has to check one."},
    {"know", (PyCFunction)(void (*)(void))know, METH_FASTCALL, "Set the types of plain arrays."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_fingerprint", "Fingerprints of arrays, compiled.", sizeof(State), methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__fingerprint(void) {
    for (int i = 0; i < LAZY; i++)
        if ((names[i] = PyUnicode_InternFromString(texts[i])) == NULL)
            return NULL;
    is_conj = PyUnicode_InternFromString("is_conj");
    is_neg = PyUnicode_InternFromString("is_neg");
    return is_conj == NULL || is_neg == NULL ? NULL : PyModule_Create(&definition);
}
