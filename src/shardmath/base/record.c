/* The record of this rank's operations: each one's name, operands, calling line and times.
 *
 * Peers and `inspect` read the record at any time; recorder.py has its layout. Only this process writes it, in
 * threads that hold the GIL. An entry's number is 0 while it is written. Finding the user's line takes most of
 * the time, so places in code are cached by code object and offset.
 */

#include "ndarray.h"
#include "record.h"

#include <frameobject.h>
#if PY_VERSION_HEX < 0x030C0000
#define Py_BUILD_CORE_MODULE
#include <internal/pycore_frame.h>
#endif
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { OPERATIONS = 256, HEAD = 4096, PLACES = 512 }; /* OPERATIONS and HEAD as in recorder.py */

typedef struct {
    uint64_t number, begun, ended, state, stream;
    uint32_t thread, line;
    char name[48], operands[72], file[88];
} Entry;

_Static_assert(sizeof(Entry) == 256, "as in recorder.py");

typedef struct {
    PyObject *code;
    int offset, line, is_ours;
    char file[sizeof((Entry *)0)->file];
} Place;

static Py_buffer memory;
static uint64_t turn; /* the number of entries, a power of two, minus 1 */
static PyObject *ours, *passed, *shape; /* beginnings, and parts, of names of files that are not the user's */
static Place places[PLACES];
static _Thread_local uint64_t under_way; /* the number of this thread's operation; 0 for none */

static uint64_t *last_number(void) {
    return (uint64_t *)memory.buf;
}

static Entry *entry_of(uint64_t number) {
    return (Entry *)((char *)memory.buf + HEAD) + (number & turn);
}

static uint64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

/* -- the user's line ------------------------------------------------------------------------------------- */

/* Copy the end of a text, as much as there is room for. */
static void put_end(char *room, size_t size, const char *text) {
    size_t length = strlen(text), left_out = length < size ? 0 : length - size + 1;
    memcpy(room, text + left_out, length - left_out + 1);
}

static int passes_through(const char *file) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ours); i++) {
        const char *begin = PyUnicode_AsUTF8(PyTuple_GET_ITEM(ours, i));
        if (begin != NULL && strncmp(file, begin, strlen(begin)) == 0)
            return 1;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(passed); i++) {
        const char *part = PyUnicode_AsUTF8(PyTuple_GET_ITEM(passed, i));
        if (part != NULL && strstr(file, part) != NULL)
            return 1;
    }
    return 0;
}

/* The slot in which a place is cached, if it is known. */
static Place *kept_place(const PyCodeObject *code, int offset) {
    return places + (((uintptr_t)code >> 5) ^ ((uintptr_t)(unsigned)offset * 37u)) % PLACES;
}

static const Place *place_of(PyFrameObject *frame) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    int offset = PyFrame_GetLasti(frame);
    Place *place = kept_place(code, offset);
    if (place->code != (PyObject *)code || place->offset != offset) {
        const char *file = PyUnicode_AsUTF8(code->co_filename);
        PyErr_Clear();
        PyObject *before = place->code;
        *place = (Place){Py_NewRef((PyObject *)code), offset, PyFrame_GetLineNumber(frame), 0, ""};
        place->is_ours = file != NULL && passes_through(file);
        put_end(place->file, sizeof place->file, file == NULL ? "" : file);
        Py_XDECREF(before);
    }
    Py_DECREF(code);
    return place;
}

/* The innermost line of the user's, where the places of all frames up to there are cached. This needs no Python
 * object of a frame, which would take as long as everything else here. NULL where a place is not cached, or in
 * versions of Python whose frames are laid out otherwise. */
static const Place *known_line_of_user(void) {
#if PY_VERSION_HEX < 0x030C0000
    const struct _PyInterpreterFrame *frame = PyThreadState_Get()->cframe->current_frame;
    while (frame != NULL && (frame = frame->previous) != NULL) {
        int offset = (int)((const char *)frame->prev_instr - frame->f_code->co_code_adaptive);
        const Place *place = kept_place(frame->f_code, offset);
        if (place->code != (PyObject *)frame->f_code || place->offset != offset)
            return NULL;
        if (!place->is_ours)
            return place;
    }
#endif
    return NULL;
}

/* The innermost line of the user's; NULL for none. */
static const Place *line_of_user(void) {
    const Place *place = known_line_of_user();
    PyFrameObject *own = place == NULL ? PyEval_GetFrame() : NULL, *frame = own == NULL ? NULL : PyFrame_GetBack(own);
    while (frame != NULL) {
        place = place_of(frame);
        PyFrameObject *back = place->is_ours ? PyFrame_GetBack(frame) : NULL;
        Py_DECREF(frame);
        frame = back;
    }
    return place;
}

/* -- operands -------------------------------------------------------------------------------------------- */

enum { OPERANDS = sizeof((Entry *)0)->operands };

typedef struct {
    char room[OPERANDS], *next, *end;
} Text;

static void put(Text *text, const char *what) {
    while (*what != 0 && text->next < text->end)
        *text->next++ = *what++;
}

static void put_number(Text *text, Py_ssize_t number) {
    char digits[24], *first = digits + sizeof digits - 1;
    *first = 0;
    do
        *--first = (char)('0' + number % 10);
    while ((number /= 10) > 0 && first > digits);
    put(text, first);
}

static const char *name_of(PyTypeObject *type) {
    const char *dot = strrchr(type->tp_name, '.');
    return dot == NULL ? type->tp_name : dot + 1;
}

static void put_axes(Text *text, PyTypeObject *type, const Py_ssize_t *lengths, Py_ssize_t axes) {
    put(text, text->next == text->room ? "" : " ");
    put(text, name_of(type));
    put(text, "[");
    for (Py_ssize_t i = 0; i < axes; i++) {
        put(text, i == 0 ? "" : ",");
        put_number(text, lengths[i]);
    }
    put(text, "]");
}

/* In all versions of NumPy, a dtype object begins with the type of its scalars. */
static void put_array(Text *text, const NDArray *x) {
    put_axes(text, *(PyTypeObject **)((PyObject *)x->dtype + 1), x->shape, x->axes);
}

/* Add an object that has a shape. -1 with an exception that `x` itself did not raise, such as an interrupt. */
static int put_operand(Text *text, PyObject *x) {
    static PyTypeObject *ndarray; /* found once, and kept alive */
    if (ndarray == NULL && strcmp(Py_TYPE(x)->tp_name, "numpy.ndarray") == 0)
        ndarray = (PyTypeObject *)Py_NewRef((PyObject *)Py_TYPE(x));
    if (Py_TYPE(x) == ndarray) {
        put_array(text, (NDArray *)x);
        return 0;
    }
    if (PyLong_CheckExact(x) || PyUnicode_CheckExact(x) || PyFloat_CheckExact(x) || x == Py_None)
        return 0;
    PyObject *found = PyObject_GetAttr(x, shape);
    Py_ssize_t lengths[8], axes = found != NULL && PyTuple_Check(found) ? PyTuple_GET_SIZE(found) : -1;
    for (Py_ssize_t i = 0; i < axes && i < 8; i++)
        lengths[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(found, i));
    Py_XDECREF(found);
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    if (axes >= 0 && axes <= 8 && !PyErr_Occurred())
        put_axes(text, Py_TYPE(x), lengths, axes);
    PyErr_Clear();
    return 0;
}

/* -- operations ------------------------------------------------------------------------------------------ */

static void put_name(Entry *entry, PyObject *function) {
    const char *name = PyFunction_Check(function) ? PyUnicode_AsUTF8(((PyFunctionObject *)function)->func_qualname)
                                                  : Py_TYPE(function)->tp_name;
    put_end(entry->name, sizeof entry->name, name == NULL ? "" : name);
    PyErr_Clear();
}

/* Write an entry. No Python object is made here, so no other thread comes in between. */
static void publish(PyObject *function, Text *operands, const Place *line) {
    uint64_t number = *last_number() + 1;
    Entry *entry = entry_of(number);
    __atomic_store_n(&entry->number, 0, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    entry->ended = entry->state = entry->stream = 0;
    entry->thread = (uint32_t)PyThread_get_thread_ident();
    put_name(entry, function);
    memcpy(entry->operands, operands->room, sizeof entry->operands);
    entry->line = line == NULL ? 0 : (uint32_t)line->line;
    memcpy(entry->file, line == NULL ? "" : line->file, line == NULL ? 1 : sizeof entry->file);
    entry->begun = now();
    __atomic_store_n(&entry->number, number, __ATOMIC_RELEASE);
    __atomic_store_n(last_number(), number, __ATOMIC_RELEASE);
    under_way = number;
}

static void start_of(Text *text) {
    memset(text->room, 0, sizeof text->room);
    text->next = text->room;
    text->end = text->room + sizeof text->room - 1;
}

static int begin_known(PyObject *function, PyObject *const *arrays, int count) {
    if (memory.buf == NULL)
        return 0;
    Text operands;
    start_of(&operands);
    for (int i = 0; i < count; i++)
        if (put_operand(&operands, arrays[i]) < 0)
            return -1;
    const Place *line = line_of_user();
    if (memory.buf != NULL) /* Python code that was asked for a shape may have stopped recording */
        publish(function, &operands, line);
    return 0;
}

static void end_with(int state) {
    Entry *entry = under_way == 0 || memory.buf == NULL ? NULL : entry_of(under_way);
    if (entry != NULL && entry->number == under_way) {
        entry->state = (uint64_t)state;
        __atomic_store_n(&entry->ended, now(), __ATOMIC_RELEASE);
    }
    under_way = 0;
}

/* Remove the operation under way: it begins again. */
static void withdraw(void) {
    if (memory.buf != NULL && under_way != 0 && under_way == *last_number()) {
        __atomic_store_n(&entry_of(under_way)->number, 0, __ATOMIC_RELEASE);
        __atomic_store_n(last_number(), under_way - 1, __ATOMIC_RELEASE);
        under_way = 0;
    }
    end_with(RETURNED);
}

/* begin(function, arguments): an operation of `function` begins in this thread. */
static PyObject *begin(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyTuple_Check(given[1])) {
        PyErr_SetString(PyExc_TypeError, "begin(function, arguments)");
        return NULL;
    }
    if (memory.buf == NULL)
        Py_RETURN_NONE;
    Text operands;
    start_of(&operands);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given[1]); i++)
        if (put_operand(&operands, PyTuple_GET_ITEM(given[1], i)) < 0)
            return NULL;
    const Place *line = line_of_user();
    if (memory.buf != NULL) /* as in begin_known */
        publish(given[0], &operands, line);
    Py_RETURN_NONE;
}

/* end(): this thread's operation has returned. */
static PyObject *end(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    end_with(RETURNED);
    Py_RETURN_NONE;
}

/* leave(): an exception has left this thread's operation, if one is under way. */
static PyObject *leave(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    end_with(RAISED);
    Py_RETURN_NONE;
}

static void note_stream(uint64_t address) {
    Entry *entry = under_way == 0 || memory.buf == NULL ? NULL : entry_of(under_way);
    if (entry != NULL && entry->number == under_way)
        entry->stream = address;
}

/* on_stream(address): this thread's operation works on that stream of its GPU. */
static PyObject *on_stream(PyObject *module, PyObject *given) {
    (void)module;
    uint64_t address = PyLong_AsUnsignedLongLong(given);
    if (PyErr_Occurred())
        return NULL;
    note_stream(address);
    Py_RETURN_NONE;
}

/* record_in(memory, ours, passed): record in `memory` from now on; None: record nothing. */
static PyObject *record_in(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    (void)module;
    if (count != 3 || !PyTuple_Check(given[1]) || !PyTuple_Check(given[2])) {
        PyErr_SetString(PyExc_TypeError, "record_in(memory, ours, passed)");
        return NULL;
    }
    if (memory.buf != NULL)
        PyBuffer_Release(&memory);
    memory.buf = NULL;
    under_way = 0;
    Py_XSETREF(ours, Py_NewRef(given[1]));
    Py_XSETREF(passed, Py_NewRef(given[2]));
    if (given[0] == Py_None)
        Py_RETURN_NONE;
    Py_buffer room;
    if (PyObject_GetBuffer(given[0], &room, PyBUF_WRITABLE) < 0)
        return NULL;
    if (room.len < (Py_ssize_t)(HEAD + OPERATIONS * sizeof(Entry)) || (uintptr_t)room.buf % sizeof(uint64_t)) {
        PyBuffer_Release(&room);
        PyErr_SetString(PyExc_ValueError, "no room for a record");
        return NULL;
    }
    memory = room;
    for (turn = OPERATIONS; (Py_ssize_t)(HEAD + 2 * turn * sizeof(Entry)) <= room.len; turn *= 2)
        ;
    turn--;
    Py_RETURN_NONE;
}

/* -- spans: what happens inside operations, only where a program is traced ------------------------------- */

typedef struct {
    uint64_t begun, ended;
    uint32_t site, thread;
} Entered; /* as in spans.py */

enum { SPANS_HEAD = 64 }; /* as in spans.py; the number of spans so far comes first */

static Py_buffer spans;
static uint64_t spans_turn; /* the number of entries, a power of two, minus 1 */
static _Thread_local uint64_t marked;

static void put_span(uint32_t site, uint64_t begun) {
    if (spans.buf == NULL) /* this is a forked child */
        return;
    uint64_t number = *(uint64_t *)spans.buf;
    Entered *entry = (Entered *)((char *)spans.buf + SPANS_HEAD) + (number & spans_turn);
    *entry = (Entered){begun, now(), site, (uint32_t)PyThread_get_thread_ident()};
    __atomic_store_n((uint64_t *)spans.buf, number + 1, __ATOMIC_RELEASE); /* last: a rank may be killed in between */
}

enum { AROUND, BEGIN, END };

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *call; /* NULL but for AROUND */
    uint32_t site;
    int what;
} Span;

static PyObject *span_call(PyObject *object, PyObject *const *given, size_t count, PyObject *words) {
    Span *self = (Span *)object;
    uint64_t begun = now();
    PyObject *result = self->call == NULL ? Py_NewRef(Py_None)
                                          : PyObject_Vectorcall(self->call, given, PyVectorcall_NARGS(count), words);
    if (self->what == BEGIN)
        marked = begun;
    else if (result != NULL)
        put_span(self->site, self->what == END ? marked : begun);
    return result;
}

static int span_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Span *)self)->call);
    return 0;
}

static int span_clear(PyObject *self) {
    Py_CLEAR(((Span *)self)->call);
    return 0;
}

static void span_free(PyObject *self) {
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((Span *)self)->call);
    PyObject_GC_Del(self);
}

#define SPAN_TYPE(name)                                                                                             \
    {                                                                                                               \
        PyVarObject_HEAD_INIT(NULL, 0).tp_name = name, .tp_basicsize = sizeof(Span), .tp_dealloc = span_free,       \
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,                           \
        .tp_vectorcall_offset = offsetof(Span, vectorcall), .tp_call = PyVectorcall_Call,                           \
        .tp_traverse = span_traverse, .tp_clear = span_clear,                                                       \
    }

/* A span of what runs no Python runs none either; direct.c knows such steps by the name of their type. */
static PyTypeObject SpanType = SPAN_TYPE("shardmath.base._record.Span"), PlainSpanType = SPAN_TYPE("CompiledStep");

static PyObject *new_span(PyTypeObject *type, PyObject *call, uint32_t site, int what) {
    Span *made = PyObject_GC_New(Span, type);
    if (made == NULL)
        return NULL;
    made->vectorcall = span_call;
    made->call = Py_XNewRef(call);
    made->site = site;
    made->what = what;
    PyObject_GC_Track((PyObject *)made);
    return (PyObject *)made;
}

/* around(call, site, is plain): a function that makes the call, and writes when it began and ended. */
static PyObject *around(PyObject *module, PyObject *given) {
    (void)module;
    PyObject *call;
    unsigned site;
    int plain;
    if (!PyArg_ParseTuple(given, "OIp", &call, &site, &plain))
        return NULL;
    return new_span(plain ? &PlainSpanType : &SpanType, call, site, AROUND);
}

/* marks(site): two functions; the second writes a span that began when this thread called the first. */
static PyObject *marks(PyObject *module, PyObject *given) {
    (void)module;
    unsigned long site = PyLong_AsUnsignedLong(given);
    if (PyErr_Occurred())
        return NULL;
    PyObject *begins = new_span(&PlainSpanType, NULL, (uint32_t)site, BEGIN);
    PyObject *ends = begins == NULL ? NULL : new_span(&PlainSpanType, NULL, (uint32_t)site, END);
    return ends == NULL ? Py_XDECREF(begins), NULL : Py_BuildValue("NN", begins, ends);
}

/* spans_in(memory): write spans into `memory` from now on; None: write none. */
static PyObject *spans_in(PyObject *module, PyObject *given) {
    (void)module;
    if (spans.buf != NULL)
        PyBuffer_Release(&spans);
    spans.buf = NULL;
    if (given == Py_None)
        Py_RETURN_NONE;
    Py_buffer room;
    if (PyObject_GetBuffer(given, &room, PyBUF_WRITABLE) < 0)
        return NULL;
    uint64_t entries = room.len < SPANS_HEAD ? 0 : (uint64_t)(room.len - SPANS_HEAD) / sizeof(Entered);
    if (entries == 0 || (uintptr_t)room.buf % sizeof(uint64_t)) {
        PyBuffer_Release(&room);
        PyErr_SetString(PyExc_ValueError, "no room for spans");
        return NULL;
    }
    spans = room;
    for (spans_turn = 1; 2 * spans_turn <= entries; spans_turn *= 2)
        ;
    spans_turn--;
    Py_RETURN_NONE;
}

static const Record record = {begin_known, note_stream, end_with, withdraw};

static PyMethodDef methods[] = {
    {"record_in", (PyCFunction)(void (*)(void))record_in, METH_FASTCALL, "Write into that memory from now on."},
    {"begin", (PyCFunction)(void (*)(void))begin, METH_FASTCALL, "An operation of this thread begins."},
    {"on_stream", on_stream, METH_O, "It works on that stream."},
    {"end", end, METH_NOARGS, "It has returned."},
    {"leave", leave, METH_NOARGS, "An exception has left it, if one is under way."},
    {"spans_in", spans_in, METH_O, "Write spans into that memory from now on."},
    {"around", around, METH_VARARGS, "A function that makes a call within a span."},
    {"marks", marks, METH_O, "Two functions that begin and end a span."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_record", "The record of a rank's operations.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__record(void) {
    if ((shape = PyUnicode_InternFromString("shape")) == NULL)
        return NULL;
    if (PyType_Ready(&SpanType) < 0 || PyType_Ready(&PlainSpanType) < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition), *capsule = PyCapsule_New((void *)&record, RECORDING, NULL);
    if (module == NULL || PyModule_AddObjectRef(module, "RECORDING", capsule) < 0 ||
        PyModule_AddIntConstant(module, "INTERFACE", 1) < 0)
        Py_CLEAR(module);
    Py_XDECREF(capsule);
    return module;
}
