/* Copies of a few small boxes, bound once and made in one call.
 *
 * A copy through NumPy takes about a microsecond before its first byte, which is more than what a few
 * kilobytes take. Built when the package is installed where there is a C compiler; without it host.py copies
 * box by box. Invariant: no byte is read or written outside the boxes; they are copied in their order.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

enum { MOST_AXES = 16 };

typedef struct {
    char *to;
    const char *from;
    Py_ssize_t unit, axes, shape[MOST_AXES], to_strides[MOST_AXES], from_strides[MOST_AXES];
} Box;

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* what holds the memory */
    Py_ssize_t count;
    Box *boxes;
} Boxes;

#define ROW(UNIT)                                                                            \
    case UNIT:                                                                               \
        for (Py_ssize_t i = 0; i < n; i++, to += to_step, from += from_step)                 \
            memcpy(to, from, UNIT);                                                          \
        return;

/* The units of the last axis. */
static void copy_row(char *to, const char *from, Py_ssize_t unit, Py_ssize_t n, Py_ssize_t to_step,
                     Py_ssize_t from_step) {
    if (to_step == unit && from_step == unit) {
        memmove(to, from, (size_t)(n * unit));
        return;
    }
    switch (unit) {
        ROW(1)
        ROW(2)
        ROW(4)
        ROW(8)
        ROW(16)
    }
    for (Py_ssize_t i = 0; i < n; i++, to += to_step, from += from_step)
        memmove(to, from, (size_t)unit);
}

static void copy(const Box *box, Py_ssize_t axis, char *to, const char *from) {
    if (axis == box->axes) {
        memmove(to, from, (size_t)box->unit);
        return;
    }
    Py_ssize_t n = box->shape[axis], to_step = box->to_strides[axis], from_step = box->from_strides[axis];
    if (axis + 1 == box->axes)
        copy_row(to, from, box->unit, n, to_step, from_step);
    else
        for (Py_ssize_t i = 0; i < n; i++, to += to_step, from += from_step)
            copy(box, axis + 1, to, from);
}

static PyObject *call(PyObject *self, PyObject *arguments, PyObject *named) {
    if (PyTuple_GET_SIZE(arguments) || (named != NULL && PyDict_GET_SIZE(named))) {
        PyErr_SetString(PyExc_TypeError, "boxes take no arguments");
        return NULL;
    }
    const Boxes *boxes = (const Boxes *)self;
    for (Py_ssize_t i = 0; i < boxes->count; i++)
        copy(boxes->boxes + i, 0, boxes->boxes[i].to, boxes->boxes[i].from);
    Py_RETURN_NONE;
}

static int read_extents(PyObject *tuple, Py_ssize_t axes, Py_ssize_t *extents) {
    if (!PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) != axes)
        return -1;
    for (Py_ssize_t i = 0; i < axes; i++)
        extents[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(tuple, i));
    return PyErr_Occurred() ? -1 : 0;
}

static int read_box(PyObject *given, Box *box) {
    PyObject *shape, *to_strides, *from_strides;
    unsigned long long to, from;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "KKOOOn", &to, &from, &shape, &to_strides, &from_strides,
                                                   &box->unit))
        return -1;
    box->to = (char *)(uintptr_t)to;
    box->from = (const char *)(uintptr_t)from;
    box->axes = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : MOST_AXES + 1;
    if (box->axes > MOST_AXES || box->unit < 1)
        return -1;
    return read_extents(shape, box->axes, box->shape) < 0 ||
                   read_extents(to_strides, box->axes, box->to_strides) < 0 ||
                   read_extents(from_strides, box->axes, box->from_strides) < 0
               ? -1
               : 0;
}

/* Boxes(boxes, keep): tuples of addresses to and from, shape in units, strides to and from, bytes of a unit. */
static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    PyObject *given, *keep;
    if ((named != NULL && PyDict_GET_SIZE(named)) ||
        !PyArg_ParseTuple(arguments, "O!O", &PyTuple_Type, &given, &keep)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "boxes take no names");
        return NULL;
    }
    Boxes *boxes = (Boxes *)type->tp_alloc(type, 0);
    if (boxes == NULL)
        return NULL;
    boxes->count = PyTuple_GET_SIZE(given);
    boxes->keep = Py_NewRef(keep);
    boxes->boxes = PyMem_Calloc((size_t)boxes->count + 1, sizeof(Box));
    if (boxes->boxes == NULL) {
        Py_DECREF(boxes);
        return PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; i < boxes->count; i++)
        if (read_box(PyTuple_GET_ITEM(given, i), boxes->boxes + i) < 0) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "no such box");
            Py_DECREF(boxes);
            return NULL;
        }
    return (PyObject *)boxes;
}

static void drop(Boxes *boxes) {
    PyTypeObject *type = Py_TYPE(boxes);
    PyMem_Free(boxes->boxes);
    Py_XDECREF(boxes->keep);
    type->tp_free(boxes);
    Py_DECREF(type);
}

static PyType_Slot slots[] = {
    {Py_tp_doc, "Copies of boxes, in their order, each time that it is called."},
    {Py_tp_new, make},
    {Py_tp_dealloc, drop},
    {Py_tp_call, call},
    {0, NULL},
};

static PyType_Spec boxes_type = {"shardmath.redistribution._box.Boxes", sizeof(Boxes), 0, Py_TPFLAGS_DEFAULT, slots};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_box", "Copies of small boxes, compiled.", 0, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__box(void) {
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&boxes_type);
    if (module == NULL || type == NULL || PyModule_AddObjectRef(module, "Boxes", type) < 0)
        Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
