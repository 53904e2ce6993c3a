/* A repeated call of a collective: check its arrays, list it, launch its kernel, all in one call. And launches that come
 * again with other arrays, and that nobody lists.
 *
 * Built at installation where there is a C compiler; without it Python does the same, step by step. Where anything
 * differs from the last time, `go` does nothing and returns None, and Python makes the call.
 *
 * Invariant: between the word that lists a call and its launch no Python code runs in this thread, and so no signal
 * handler. The driver may wait for room in its queue of launches: other threads run meanwhile, among them the one that
 * ends kernels whose peers have gone.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../arrays/attributes.h"
#include "../base/pause.h"

#ifndef DRIVER
#define DRIVER "libcuda.so.1" /* tests have another */
#endif

enum { PARAMETERS = 4096, PEERS = 256, WORDS = 16, SPINS = 1 << 12, ARRAYS = 4 };
enum { LISTED = -1 }; /* no answer of the driver: the call is listed, and Python does the rest */

typedef int (*LaunchKernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                            void **, void **);
typedef int (*CurrentContext)(void **);

static LaunchKernel launch_kernel;
static CurrentContext current_context;
static void *copy_memory; /* NULL if the driver has no such function */

/* What an array must be. If its first extent may be any, `nbytes` are those of one index. */
typedef struct {
    PyObject *dtype, *shape;
    int64_t device; /* see `device_of` */
    uint64_t nbytes;
} Expected;

/* An array: its address (0 where it is not as expected), its bytes, and its first extent. */
typedef struct {
    uint64_t address, nbytes, extent;
} Found;

/* A kernel, its blocks and its threads. */
typedef struct {
    void *function;
    unsigned blocks, threads;
} Grid;

typedef struct {
    PyObject_HEAD
    Attributes attributes;      /* of arrays of the library */
    Expected operand, result;
    Grid grid;
    void *context;              /* the CUDA context, which must be current */
    Py_ssize_t parameters, place; /* bytes of the kernel's argument, and the place of two addresses in it */
    uint64_t unaligned;         /* bits that must be 0 in addresses */
    int in_place;               /* whether the result may lie where the operand does */
    const uint64_t *report;     /* not 0 once a kernel has reported something */
    uint64_t *made, *tags, *words; /* this rank's list of calls: how many; tags and words of the last `window` */
    uint64_t own_words[WORDS];  /* the words of this call, */
    Py_ssize_t word_bytes;      /* and their bytes */
    Py_ssize_t ranks;           /* for a call with counts; 0 for others */
    uint64_t mail;              /* bytes to or from a peer up to which `grid` serves; beyond, `lane_blocks` */
    unsigned lane_blocks, rank;
    Grid few;                   /* another kernel, for calls whose parts have at most `few_bytes` */
    uint64_t few_bytes;
    uint64_t window, tag;
    Py_ssize_t peers;
    const uint64_t *listed[PEERS]; /* how many calls each peer has listed */
    int asks;                   /* whether to launch only if each peer lists these words: */
    uint64_t others[WORDS][WORDS];
    char argument[PARAMETERS];
} Repeat;

/* Whether a shape is as expected: 1, 0 or -1. With `any`, any first extent is, and goes to `extent`. */
static int fits(const Expected *expected, int any, PyObject *shape, uint64_t *extent) {
    if (!any)
        return PyObject_RichCompareBool(shape, expected->shape, Py_EQ);
    Py_ssize_t ndim = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : 0;
    if (ndim == 0 || ndim != PyTuple_GET_SIZE(expected->shape))
        return 0;
    for (Py_ssize_t i = 1; i < ndim; i++) {
        int same = PyObject_RichCompareBool(PyTuple_GET_ITEM(shape, i), PyTuple_GET_ITEM(expected->shape, i), Py_EQ);
        if (same != 1)
            return same;
    }
    *extent = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, 0));
    return PyErr_Occurred() ? -1 : 1;
}

/* Look at an array of the library. See `fits`. An exception may be set, which the caller clears. */
static Found look(const Attributes *attributes, const Expected *expected, int any, PyObject *x) {
    Found found = {0, expected->nbytes, 1};
    if (Py_TYPE(x) != attributes->type)
        return found;
    PyObject *dtype = at(&attributes->dtype, x);
    Py_XDECREF(dtype); /* it lives as long as the array */
    if (dtype != expected->dtype)
        return found;
    PyObject *shape = at(&attributes->shape, x);
    int same = shape == NULL ? -1 : has_elements(shape) ? fits(expected, any, shape, &found.extent) : 0;
    Py_XDECREF(shape);
    if (same != 1 || is_special(attributes, x) != 0 || truth_at(&attributes->contiguous, x) != 1 ||
        device_of(attributes, x) != expected->device)
        return found;
    PyObject *pointer = at(&attributes->address, x);
    uint64_t address = pointer == NULL ? 0 : PyLong_AsUnsignedLongLong(pointer);
    Py_XDECREF(pointer);
    found.nbytes *= found.extent;
    found.address = PyErr_Occurred() ? 0 : address;
    return found;
}

/* Note what arrays like `x` are: 0, or -1 with an exception. */
static int expect(const Attributes *attributes, PyObject *x, uint64_t nbytes, Expected *expected) {
    expected->nbytes = nbytes;
    expected->dtype = at(&attributes->dtype, x);
    expected->shape = expected->dtype == NULL ? NULL : at(&attributes->shape, x);
    expected->device = expected->shape == NULL ? 0 : device_of(attributes, x);
    return PyErr_Occurred() ? -1 : 0;
}

/* Whether the result may be written: it is apart from the operand, or in its very place, if that is allowed. */
static int apart(const Repeat *self, Found x, Found out) {
    if (x.address == 0 || out.address == 0 || ((x.address | out.address) & self->unaligned) != 0)
        return 0;
    return out.address + out.nbytes <= x.address || x.address + x.nbytes <= out.address ||
           (self->in_place && x.address == out.address);
}

/* Read a tuple of `ranks` counts; 0 where it is anything else. */
static int counts_of(PyObject *given, Py_ssize_t ranks, uint64_t *counts, uint64_t *sum) {
    if (!PyTuple_CheckExact(given) || PyTuple_GET_SIZE(given) != ranks)
        return 0;
    *sum = 0;
    for (Py_ssize_t r = 0; r < ranks; r++) {
        PyObject *each = PyTuple_GET_ITEM(given, r);
        if (!PyLong_CheckExact(each))
            return 0;
        counts[r] = PyLong_AsUnsignedLongLong(each);
        *sum += counts[r];
        if (PyErr_Occurred() || counts[r] > UINT32_MAX) /* negative counts, and those that could make sums wrap */
            return 0;
    }
    return 1;
}

/* Write into the argument of exchange.cu, behind the addresses: the starts of parts; the counts sent, expected and in
 * all; and the guess of all ranks' counts, as `Parts.guessed`. Returns the launch to make; with no blocks where Python
 * has to make the call. */
static Grid write_counts(const Repeat *self, char *argument, uint64_t *words, Found x, Found out,
                         PyObject *sent, PyObject *expected) {
    const Grid none = {NULL, 0, 0};
    Grid grid = self->grid;
    int alike = 1;
    uint64_t tail[3 * WORDS + 2], *starts = tail, *row = tail + self->ranks, sum, most = 0, largest = 0;
    const uint64_t width = self->operand.nbytes;
    const Py_ssize_t ranks = self->ranks;
    if (!counts_of(sent, ranks, row, &sum) || sum != x.extent)
        return none;
    if (expected == Py_None)
        memset(row + ranks, 0xff, (size_t)ranks * sizeof *row);
    else if (!counts_of(expected, ranks, row + ranks, &sum) || sum != out.extent)
        return none;
    if (ranks == 1 && sum != out.extent) /* an error, which Python raises without a kernel */
        return none;
    row[2 * ranks] = out.extent;
    for (Py_ssize_t r = 0, at = 0; r < ranks; at += row[r++]) {
        starts[r] = (uint64_t)at * width;
        if (r != self->rank && row[r] > most)
            most = row[r];
    }
    if (out.extent > row[self->rank] && out.extent - row[self->rank] > most)
        most = out.extent - row[self->rank];
    for (Py_ssize_t r = 0; r < (expected == Py_None ? ranks : 2 * ranks); r++) {
        alike &= row[r] == row[0];
        largest = row[r] > largest ? row[r] : largest;
    }
    tail[3 * ranks + 1] = alike && out.extent == row[0] * (uint64_t)ranks ? row[0] : UINT64_MAX;
    memcpy(words, row, (size_t)ranks * sizeof *row);
    memcpy(argument + self->place + 24, tail, (size_t)(3 * ranks + 2) * sizeof *tail);
    if (most * width > self->mail)
        grid.blocks = self->lane_blocks;
    else if (largest * width <= self->few_bytes) {
        grid = self->few;
        grid.blocks = (unsigned)((largest * width + 8 * grid.threads - 1) / (8 * grid.threads));
        grid.blocks += grid.blocks == 0;
    }
    return grid;
}

/* Whether every peer is close enough behind to find this call in the list. */
static int has_room(const Repeat *self, uint64_t number) {
    for (Py_ssize_t i = 0; i < self->peers; i++)
        if (__atomic_load_n(self->listed[i], __ATOMIC_RELAXED) + self->window <= number)
            return 0;
    return 1;
}

/* Whether all peers list this call with the same words as the last time. A late peer is left to Python, which notices
 * if it has died. */
static int peers_agree(const Repeat *self, uint64_t number) {
    const ptrdiff_t tags = self->tags - self->made, words = self->words - self->made;
    const uint64_t place = number % self->window;
    for (Py_ssize_t i = 0; i < self->peers; i++) {
        const uint64_t *listed = self->listed[i];
        for (int spins = 0; __atomic_load_n(listed, __ATOMIC_ACQUIRE) < number; spins++) {
            if (spins == SPINS)
                return 0;
            pause_core();
        }
        if (listed[tags + (ptrdiff_t)place] != self->tag ||
            memcmp(listed + words + (ptrdiff_t)place * WORDS, self->others[i], (size_t)self->word_bytes) != 0)
            return 0;
    }
    return 1;
}

/* go(operand, result, stream[, counts sent, counts expected or None]): None where Python has to make the call, LISTED
 * where Python has to complete it, else the driver's status. */
static PyObject *go(Repeat *self, PyObject *const *given, Py_ssize_t count) {
    if (count != (self->ranks ? 5 : 3)) {
        PyErr_SetString(PyExc_TypeError, "go(operand, result, stream), and counts where there are any");
        return NULL;
    }
    uint64_t stream = PyLong_AsUnsignedLongLong(given[2]);
    if (PyErr_Occurred())
        return NULL;
    const int any = self->ranks != 0;
    Found x = look(&self->attributes, &self->operand, any, given[0]), out = x;
    if (x.address)
        out = look(&self->attributes, &self->result, any, given[1]);
    char argument[PARAMETERS] __attribute__((aligned(16)));
    uint64_t words[WORDS];
    Grid grid = self->grid;
    memcpy(argument, self->argument, (size_t)self->parameters);
    memcpy(words, self->own_words, sizeof words);
    if (self->ranks && x.address && out.address)
        grid = write_counts(self, argument, words, x, out, given[3], given[4]);
    PyErr_Clear(); /* Python makes the call then, and raises it again */
    void *context = NULL;
    uint64_t number = self->peers ? *self->made + 1 : 0;
    if (!apart(self, x, out) || grid.blocks == 0 || __atomic_load_n(self->report, __ATOMIC_RELAXED) != 0 ||
        !has_room(self, number) || current_context(&context) != 0 || context != self->context)
        Py_RETURN_NONE;
    memcpy(argument + self->place, &x.address, sizeof x.address);
    memcpy(argument + self->place + sizeof x.address, &out.address, sizeof out.address);
    if (self->peers) {
        self->tags[number % self->window] = self->tag;
        memcpy(self->words + number % self->window * WORDS, words, (size_t)self->word_bytes);
        __atomic_store_n(self->made, number, __ATOMIC_RELEASE);
    }
    void *parameters[1] = {argument};
    int status = LISTED;
    Py_BEGIN_ALLOW_THREADS
    if (!self->asks || peers_agree(self, number))
        status = launch_kernel(grid.function, grid.blocks, 1, 1, grid.threads, 1, 1, 0, (void *)(uintptr_t)stream,
                               parameters, NULL);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static void *pointer(unsigned long long value) { return (void *)(uintptr_t)value; }

/* Repeat(attributes, (array, nbytes) like the operand, and like the result, in_place, unaligned,
 *        (function, context, blocks, threads, argument, place), report, (made, tags, words, window, tag, the words with it, peers),
 *        (ranks, rank, mail, lane_blocks, few_bytes, their kernel, and its threads); ranks is 0 for a call without counts) */
static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    Repeat *self = (Repeat *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    unsigned long long unaligned, function, context, report, made, tags, words, window, tag;
    unsigned long long operand_bytes, result_bytes, mail, few_bytes, few_function;
    const char *argument, *own_words, *others;
    Py_ssize_t other_bytes;
    PyObject *peers, *attributes, *operand, *result;
    if ((named != NULL && PyDict_GET_SIZE(named)) ||
        !PyArg_ParseTuple(arguments, "O(OK)(OK)pK(KKIIy#n)K(KKKKKy#O!)(nIKIKKI)z#", &attributes, &operand,
                          &operand_bytes, &result, &result_bytes, &self->in_place, &unaligned,
                          &function, &context, &self->grid.blocks, &self->grid.threads, &argument, &self->parameters,
                          &self->place, &report, &made, &tags, &words, &window, &tag, &own_words,
                          &self->word_bytes, &PyTuple_Type, &peers, &self->ranks, &self->rank, &mail,
                          &self->lane_blocks, &few_bytes, &few_function, &self->few.threads, &others, &other_bytes)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a call takes no names");
        Py_DECREF(self);
        return NULL;
    }
    if (read_attributes(attributes, &self->attributes) < 0 ||
        expect(&self->attributes, operand, operand_bytes, &self->operand) < 0 ||
        expect(&self->attributes, result, result_bytes, &self->result) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    self->peers = PyTuple_GET_SIZE(peers);
    self->asks = others != NULL;
    if (self->asks && (self->peers > WORDS || self->ranks || other_bytes != self->peers * self->word_bytes)) {
        PyErr_SetString(PyExc_ValueError, "words of each peer, in a call without counts");
        Py_DECREF(self);
        return NULL;
    }
    if (self->peers > PEERS || self->parameters > PARAMETERS || self->place < 0 ||
        self->place + 16 > self->parameters || window == 0 || self->word_bytes > (Py_ssize_t)sizeof self->own_words ||
        self->ranks > WORDS || self->rank >= WORDS ||
        (self->ranks && (self->place + 24 + (3 * self->ranks + 2) * 8 > self->parameters ||
                         !PyTuple_Check(self->operand.shape) || !PyTuple_Check(self->result.shape)))) {
        PyErr_SetString(PyExc_ValueError, "too many peers or words, or too long an argument");
        Py_DECREF(self);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < self->peers; i++)
        self->listed[i] = pointer(PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(peers, i)));
    if (PyErr_Occurred()) {
        Py_DECREF(self);
        return NULL;
    }
    self->unaligned = unaligned;
    self->grid.function = pointer(function);
    self->context = pointer(context);
    self->report = pointer(report);
    self->made = pointer(made);
    self->mail = mail;
    self->few_bytes = few_bytes;
    self->few.function = pointer(few_function);
    self->tags = pointer(tags);
    self->words = pointer(words);
    memcpy(self->own_words, own_words, (size_t)self->word_bytes);
    for (Py_ssize_t i = 0; self->asks && i < self->peers; i++)
        memcpy(self->others[i], others + i * self->word_bytes, (size_t)self->word_bytes);
    self->window = window;
    self->tag = tag;
    memcpy(self->argument, argument, (size_t)self->parameters);
    return (PyObject *)self;
}

static void drop(Repeat *self) {
    PyTypeObject *type = Py_TYPE(self);
    forget_attributes(&self->attributes);
    Py_XDECREF(self->operand.dtype);
    Py_XDECREF(self->operand.shape);
    Py_XDECREF(self->result.dtype);
    Py_XDECREF(self->result.shape);
    type->tp_free(self);
    Py_DECREF(type);
}

/* -- launches that nobody lists -------------------------------------------------------------------------- */

/* Where the argument of a kernel has the address of an array, or one so many bytes behind it. */
typedef struct {
    unsigned array;
    Py_ssize_t place;
    unsigned long long behind;
} Place;

/* A kernel, and arrays that look the same each time. */
typedef struct {
    PyObject_HEAD
    Attributes attributes; /* of arrays of the library */
    Expected expected[ARRAYS];
    Py_ssize_t arrays, places;
    Place place[2 * ARRAYS];
    Grid grid;
    void *context; /* the CUDA context, which must be current */
    Py_ssize_t parameters;
    char argument[PARAMETERS];
} Launch;

/* go(stream, array, ...): None where an array looks otherwise, or another context is current, and nothing was done;
 * else the driver's status. */
static PyObject *go_again(Launch *self, PyObject *const *given, Py_ssize_t count) {
    if (count != 1 + self->arrays) {
        PyErr_SetString(PyExc_TypeError, "go(stream, array, ...)");
        return NULL;
    }
    uint64_t stream = PyLong_AsUnsignedLongLong(given[0]);
    if (PyErr_Occurred())
        return NULL;
    uint64_t addresses[ARRAYS];
    for (Py_ssize_t i = 0; i < self->arrays; i++) {
        addresses[i] = look(&self->attributes, &self->expected[i], 0, given[1 + i]).address;
        if (addresses[i] == 0) {
            PyErr_Clear(); /* Python makes the launch then, and raises it again */
            Py_RETURN_NONE;
        }
    }
    void *context = NULL;
    if (current_context(&context) != 0 || context != self->context)
        Py_RETURN_NONE;
    char argument[PARAMETERS] __attribute__((aligned(16)));
    memcpy(argument, self->argument, (size_t)self->parameters);
    for (Py_ssize_t i = 0; i < self->places; i++) {
        uint64_t address = addresses[self->place[i].array] + self->place[i].behind;
        memcpy(argument + self->place[i].place, &address, sizeof address);
    }
    void *parameters[1] = {argument};
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = launch_kernel(self->grid.function, self->grid.blocks, 1, 1, self->grid.threads, 1, 1, 0,
                           (void *)(uintptr_t)stream, parameters, NULL);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(status);
}

static void drop_launch(Launch *self) {
    PyTypeObject *type = Py_TYPE(self);
    forget_attributes(&self->attributes);
    for (Py_ssize_t i = 0; i < self->arrays; i++) {
        Py_XDECREF(self->expected[i].dtype);
        Py_XDECREF(self->expected[i].shape);
    }
    type->tp_free(self);
    Py_DECREF(type);
}

/* Read what arrays look like, and where their addresses go: 0, or -1 with an error set. */
static int read_arrays(Launch *self, PyObject *alike, PyObject *places) {
    if (PyTuple_GET_SIZE(alike) > ARRAYS || PyTuple_GET_SIZE(places) > 2 * ARRAYS) {
        PyErr_SetString(PyExc_ValueError, "too many arrays or places");
        return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(alike); i++) {
        self->arrays = i + 1;
        if (expect(&self->attributes, PyTuple_GET_ITEM(alike, i), 0, &self->expected[i]) < 0)
            return -1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); i++) {
        Place *place = &self->place[i];
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(places, i), "InK", &place->array, &place->place, &place->behind))
            return -1;
        if (place->array >= self->arrays || place->place < 0 || place->place + 8 > self->parameters) {
            PyErr_SetString(PyExc_ValueError, "a place of no array, or outside of the argument");
            return -1;
        }
        self->places = i + 1;
    }
    return 0;
}

/* Launch(attributes, arrays that look like those of each launch, ((array, place, behind), ...),
 *        (function, context, blocks, threads, argument)) */
static PyObject *make_launch(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    Launch *self = (Launch *)type->tp_alloc(type, 0);
    if (self == NULL)
        return NULL;
    unsigned long long function, context;
    const char *argument;
    PyObject *attributes, *alike, *places;
    if ((named != NULL && PyDict_GET_SIZE(named)) ||
        !PyArg_ParseTuple(arguments, "OO!O!(KKIIy#)", &attributes, &PyTuple_Type, &alike, &PyTuple_Type, &places,
                          &function,
                          &context, &self->grid.blocks, &self->grid.threads, &argument, &self->parameters)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a launch takes no names");
        Py_DECREF(self);
        return NULL;
    }
    self->grid.function = pointer(function);
    self->context = pointer(context);
    if (self->parameters > PARAMETERS)
        PyErr_SetString(PyExc_ValueError, "too long an argument");
    else
        memcpy(self->argument, argument, (size_t)self->parameters);
    if (PyErr_Occurred() || read_attributes(attributes, &self->attributes) < 0 ||
        read_arrays(self, alike, places) < 0) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* -- the module ------------------------------------------------------------------------------------------ */

static PyMethodDef methods[] = {
    {"go", (PyCFunction)(void (*)(void))go, METH_FASTCALL,
     "Make the call. None: it differs, and nothing was done. LISTED: it was only listed."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "A call that can be repeated, on arrays that look the same."},
    {Py_tp_new, make},
    {Py_tp_dealloc, drop},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec repeat_type = {"shardmath.cuda._launch.Repeat", sizeof(Repeat), 0, Py_TPFLAGS_DEFAULT, slots};

static PyMethodDef launch_methods[] = {
    {"go", (PyCFunction)(void (*)(void))go_again, METH_FASTCALL,
     "Make the launch. None: an array looks otherwise, and nothing was done."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot launch_slots[] = {
    {Py_tp_doc, "A launch that can be repeated, on arrays that look the same."},
    {Py_tp_new, make_launch},
    {Py_tp_dealloc, drop_launch},
    {Py_tp_methods, launch_methods},
    {0, NULL},
};

static PyType_Spec launch_type = {"shardmath.cuda._launch.Launch", sizeof(Launch), 0, Py_TPFLAGS_DEFAULT, launch_slots};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_launch", "Calls that come again, compiled.", 0, NULL, NULL, NULL, NULL, NULL,
};

static int find_driver(void) {
    void *driver = dlopen(DRIVER, RTLD_NOW | RTLD_GLOBAL);
    if (driver != NULL) {
        launch_kernel = (LaunchKernel)dlsym(driver, "cuLaunchKernel");
        current_context = (CurrentContext)dlsym(driver, "cuCtxGetCurrent");
        copy_memory = dlsym(driver, "cuMemcpyDtoDAsync_v2");
    }
    if (launch_kernel != NULL && current_context != NULL)
        return 0;
    PyErr_SetString(PyExc_ImportError, "no CUDA driver here");
    return -1;
}

PyMODINIT_FUNC PyInit__launch(void) {
    if (find_driver() < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&repeat_type);
    PyObject *launch = PyType_FromSpec(&launch_type);
    /* Addresses of the functions by which direct.c copies: see copies.py. */
    PyObject *copies = copy_memory == NULL ? Py_NewRef(Py_None)
                                           : Py_BuildValue("(NN)", PyLong_FromVoidPtr(copy_memory),
                                                           PyLong_FromVoidPtr((void *)current_context));
    if (module == NULL || type == NULL || launch == NULL || copies == NULL ||
        PyModule_AddObjectRef(module, "COPIES", copies) < 0 || PyModule_AddObjectRef(module, "Repeat", type) < 0 ||
        PyModule_AddObjectRef(module, "Launch", launch) < 0 || PyModule_AddIntMacro(module, LISTED) < 0 ||
        PyModule_AddIntConstant(module, "INTERFACE", 4) < 0)
        Py_CLEAR(module);
    Py_XDECREF(type);
    Py_XDECREF(launch);
    Py_XDECREF(copies);
    return module;
}
