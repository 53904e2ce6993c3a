/* DLPack capsules, from which libraries make new arrays on the heap.
 *
 * Built at installation where there is a C compiler; without it an array interface serves, which libraries take
 * several times as long to read. Invariant: a capsule keeps the memory's owner alive until the array that is made of it
 * is gone, or until the capsule itself is, if no array was made.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* The structs of DLPack, version 0. */
typedef struct {
    int32_t type, ordinal;
} Device;

typedef struct {
    uint8_t code, bits;
    uint16_t lanes;
} DataType;

typedef struct {
    void *data;
    Device device;
    int32_t ndim;
    DataType dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} Tensor;

typedef struct Managed {
    Tensor tensor;
    void *owner;
    void (*deleter)(struct Managed *);
    int64_t extents[]; /* and strides */
} Managed;

enum { CPU = 1, CUDA = 2 };

static const char unused[] = "dltensor"; /* the name of a capsule from which no array has been made yet */

/* Called by the array's library when the array is gone, in any thread. */
static void end(Managed *managed) {
    if (Py_IsInitialized()) {
        PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF((PyObject *)managed->owner);
        PyGILState_Release(state);
    }
    PyMem_RawFree(managed);
}

static void end_capsule(PyObject *capsule) {
    if (PyCapsule_IsValid(capsule, unused)) {
        Managed *managed = PyCapsule_GetPointer(capsule, unused);
        managed->deleter(managed);
    }
}

/* capsule(code, bits, ordinal, shape, strides, owner, address): an array of this DLPack type, with strides in
 * elements, at an address of GPU `ordinal`, or of the host where that is -1. */
static PyObject *capsule(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    (void)module;
    if (count != 7 || !PyTuple_Check(given[3]) || !PyTuple_Check(given[4]) ||
        PyTuple_GET_SIZE(given[3]) != PyTuple_GET_SIZE(given[4])) {
        PyErr_SetString(PyExc_TypeError, "capsule(code, bits, ordinal, shape, strides, owner, address)");
        return NULL;
    }
    Py_ssize_t ndim = PyTuple_GET_SIZE(given[3]);
    long code = PyLong_AsLong(given[0]), bits = PyLong_AsLong(given[1]), ordinal = PyLong_AsLong(given[2]);
    void *address = PyLong_AsVoidPtr(given[6]);
    Managed *managed = PyMem_RawMalloc(sizeof *managed + 2 * (size_t)ndim * sizeof(int64_t));
    if (managed == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t axis = 0; axis < ndim; axis++) {
        managed->extents[axis] = PyLong_AsLongLong(PyTuple_GET_ITEM(given[3], axis));
        managed->extents[ndim + axis] = PyLong_AsLongLong(PyTuple_GET_ITEM(given[4], axis));
    }
    managed->tensor = (Tensor){
        .data = address,
        .device = {ordinal < 0 ? CPU : CUDA, ordinal < 0 ? 0 : (int32_t)ordinal},
        .ndim = (int32_t)ndim,
        .dtype = {(uint8_t)code, (uint8_t)bits, 1},
        .shape = managed->extents,
        .strides = managed->extents + ndim,
    };
    managed->deleter = end;
    PyObject *made = PyErr_Occurred() ? NULL : PyCapsule_New(managed, unused, end_capsule);
    if (made == NULL)
        PyMem_RawFree(managed);
    else
        managed->owner = Py_NewRef(given[5]);
    return made;
}

static PyMethodDef methods[] = {
    {"capsule", (PyCFunction)(void (*)(void))capsule, METH_FASTCALL, "Memory, for a library to make an array of."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_dlpack", "Memory as DLPack has it.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__dlpack(void) { return PyModule_Create(&definition); }
