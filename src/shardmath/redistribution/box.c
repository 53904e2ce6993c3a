/* Copies of boxes, bound once and made in one call.
 *
 * Few bytes: a copy through NumPy takes about a microsecond before its first byte, longer than a few kilobytes.
 *
 * Long rows: an ordinary store first reads the line that it overwrites, so a copy larger than the caches moves
 * three bytes for two; streaming stores go past the caches, and do not. A load also waits for an earlier store
 * to the same offset in another page, which the processor cannot tell from the same address. If the destination
 * lies a little further in its page than the source, each load of an upward copy waits: on AMD's family 25 such
 * a copy reaches 2 GB/s in place of 12, and memcpy in the caches 2 in place of 40.
 *
 * Transposing: the source is dense along another axis than the destination. A line of the destination is gathered
 * from as many rows of the source as it has units, and written at once; next comes the line of the neighbouring
 * units, so that each of these rows is read in its order.
 *
 * Built at installation where there is a C compiler; without it bound_copies.py copies box by box. Invariant: no
 * byte is read or written outside the boxes; boxes are copied in their order; and all stores are visible to
 * other processes before any store that the caller makes afterwards.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, STREAMS = 4, AHEAD = 4 * LINE };

static void load_line(__m128i line[4], const char *src) {
    for (int i = 0; i < 4; i++)
        line[i] = _mm_loadu_si128((const __m128i *)src + i);
}

static void store_line(char *dst, const __m128i line[4]) {
    for (int i = 0; i < 4; i++)
        _mm_storeu_si128((__m128i *)dst + i, line[i]);
}

static void stream_line(char *dst, const __m128i line[4]) {
    for (int i = 0; i < 4; i++)
        _mm_stream_si128((__m128i *)dst + i, line[i]);
}

/* How much further in its page the destination lies than the source. */
static size_t ahead(const char *dst, const char *src) {
    return ((uintptr_t)dst - (uintptr_t)src) % PAGE;
}

/* Copy one line of each of four stretches, which begin `apart` bytes apart. All are loaded before any is
 * stored, and the lines `next` bytes further are prefetched. */
static void stream_lines(char *dst, const char *src, size_t apart, ptrdiff_t next) {
    __m128i line[STREAMS][4];
    for (int i = 0; i < STREAMS; i++) {
        _mm_prefetch((const char *)((uintptr_t)src + i * apart + next), _MM_HINT_T0);
        load_line(line[i], src + i * apart); /* a prefetch needs no valid address */
    }
    for (int i = 0; i < STREAMS; i++)
        stream_line(dst + i * apart, line[i]);
}

/* Copy `n` contiguous bytes past the caches. Whole lines of the destination are streamed, from four stretches
 * of up to a page in turn, so that several banks of the memory are busy. The copy goes downwards if the
 * destination is ahead, so that no load has the offset of a recent store. */
static void stream_row(char *dst, const char *src, size_t n) {
    size_t head = (LINE - (uintptr_t)dst % LINE) % LINE;
    if (n < head + LINE) {
        memcpy(dst, src, n);
        return;
    }
    memcpy(dst, src, head);
    dst += head, src += head, n -= head;
    int down = ahead(dst, src) && ahead(dst, src) < PAGE / 2;
    while (n >= STREAMS * LINE) {
        size_t apart = n / STREAMS / LINE * LINE;
        if (apart > PAGE)
            apart = PAGE;
        for (size_t done = 0; done < apart; done += LINE) {
            size_t at = down ? apart - LINE - done : done;
            stream_lines(dst + at, src + at, apart, down ? -AHEAD : AHEAD);
        }
        dst += STREAMS * apart, src += STREAMS * apart, n -= STREAMS * apart;
    }
    for (; n >= LINE; dst += LINE, src += LINE, n -= LINE) {
        __m128i line[4];
        load_line(line, src);
        stream_line(dst, line);
    }
    memcpy(dst, src, n);
}

/* Copy `n` contiguous bytes through the caches: by memcpy, unless that is slow. */
static void long_row(char *dst, const char *src, size_t n) {
    if (ahead(dst, src) && ahead(dst, src) < LINE)
        for (; n >= STREAMS * LINE; dst += STREAMS * LINE, src += STREAMS * LINE, n -= STREAMS * LINE) {
            __m128i line[STREAMS][4];
            for (int i = 0; i < STREAMS; i++)
                load_line(line[i], src + i * LINE);
            for (int i = 0; i < STREAMS; i++)
                store_line(dst + i * LINE, line[i]);
        }
    memcpy(dst, src, n);
}

static void end_stores(void) {
    _mm_sfence();
}

static inline int load4(const char *src) {
    int unit;
    memcpy(&unit, src, sizeof unit);
    return unit;
}

static inline long long load8(const char *src) {
    long long unit;
    memcpy(&unit, src, sizeof unit);
    return unit;
}

/* Gather a line of units, which are `step` bytes apart, and write it to `dst`, past the caches or not. */
static inline void gather_line(char *dst, const char *src, Py_ssize_t step, Py_ssize_t unit, int past) {
    __m128i line[4];
    for (int i = 0; i < 4; i++, src += 16 / unit * step)
        switch (unit) {
            case 4:
                line[i] = _mm_set_epi32(load4(src + 3 * step), load4(src + 2 * step), load4(src + step), load4(src));
                break;
            case 8:
                line[i] = _mm_set_epi64x(load8(src + step), load8(src));
                break;
            default:
                line[i] = _mm_loadu_si128((const __m128i *)src);
        }
    if (past)
        stream_line(dst, line);
    else
        store_line(dst, line);
}

#else

enum { LINE = 64 };

static inline void gather_line(char *dst, const char *src, Py_ssize_t step, Py_ssize_t unit, int past) {
    for (Py_ssize_t done = 0; done < LINE; done += unit, src += step)
        memcpy(dst + done, src, (size_t)unit);
}

static void long_row(char *dst, const char *src, size_t n) {
    memcpy(dst, src, n);
}

static void stream_row(char *dst, const char *src, size_t n) {
    memcpy(dst, src, n);
}

static void end_stores(void) {
}

#endif

enum { MOST_AXES = 16, PAGES = 512 };
/* Ways: short units; long units, through or past the caches; transposed units, through or past the caches. */
enum { SHORT, LONG, PAST_CACHES, TRANSPOSED, TRANSPOSED_PAST_CACHES };

typedef void (*copy_unit)(char *to, const char *from, size_t nbytes);

typedef struct {
    char *to;
    const char *from;
    copy_unit copy_long; /* NULL if the units are short */
    int past;            /* whether transposed units go past the caches */
    Py_ssize_t dense;    /* the axis along which the source of a transposing copy is dense, -1 for other copies */
    Py_ssize_t unit, axes, shape[MOST_AXES], to_strides[MOST_AXES], from_strides[MOST_AXES];
} Box;

typedef struct {
    PyObject_HEAD
    PyObject *keep; /* holds the memory */
    Py_ssize_t count;
    int lets_others; /* whether other Python threads run meanwhile */
    Box *boxes;
} Boxes;

#define ROW(UNIT)                                                                            \
    case UNIT:                                                                               \
        for (Py_ssize_t i = 0; i < n; i++, to += to_step, from += from_step)                 \
            memcpy(to, from, UNIT);                                                          \
        return;

/* Copy the units of the last axis, which are short. */
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

/* Transpose as `transpose` does, unit by unit: less than a line along each row. */
static void transpose_few(char *to, Py_ssize_t to_step, const char *from, Py_ssize_t from_step, Py_ssize_t across,
                          Py_ssize_t along, Py_ssize_t unit) {
    for (Py_ssize_t i = 0; i < across; i++)
        for (Py_ssize_t j = 0; j < along; j++)
            memcpy(to + i * to_step + j * unit, from + i * unit + j * from_step, (size_t)unit);
}

/* Transpose `across` x `along` units: `across` of them lie side by side in the source and go to as many rows of the
 * destination, in each of which `along` lie side by side. Only whole lines of memory can be written past the caches,
 * so the units before the first of them are copied one by one, if lines begin at the same unit in all rows. */
static inline void transpose(char *to, Py_ssize_t to_step, const char *from, Py_ssize_t from_step, Py_ssize_t across,
                             Py_ssize_t along, Py_ssize_t unit, int past) {
    Py_ssize_t of_line = LINE / unit, head = 0;
    if (to_step % LINE == 0 && (uintptr_t)to % (size_t)unit == 0)
        head = (Py_ssize_t)((LINE - (uintptr_t)to % LINE) % LINE) / unit;
    else
        past = 0;
    if (head > along)
        head = along;
    transpose_few(to, to_step, from, from_step, across, head, unit);
    Py_ssize_t done = head;
    for (; done + of_line <= along; done += of_line)
        for (Py_ssize_t i = 0; i < across; i++)
            gather_line(to + i * to_step + done * unit, from + i * unit + done * from_step, from_step, unit, past);
    transpose_few(to + done * unit, to_step, from + done * from_step, from_step, across, along - done, unit);
}

/* Transpose the last axis with the axis along which the source is dense. Each unit of the latter goes to another row
 * of the destination, and so to another page: only as many are taken at a time as the processor keeps pages in mind. */
static void transpose_axes(const Box *box, char *to, const char *from) {
    Py_ssize_t last = box->axes - 1, to_step = box->to_strides[box->dense], from_step = box->from_strides[last];
    for (Py_ssize_t rest = box->shape[box->dense]; rest > 0; rest -= PAGES) {
        Py_ssize_t across = rest < PAGES ? rest : PAGES, along = box->shape[last];
        switch (box->unit) {
            case 4:
                transpose(to, to_step, from, from_step, across, along, 4, box->past);
                break;
            case 8:
                transpose(to, to_step, from, from_step, across, along, 8, box->past);
                break;
            default:
                transpose(to, to_step, from, from_step, across, along, 16, box->past);
        }
        to += across * to_step, from += across * box->unit;
    }
}

static void copy(const Box *box, Py_ssize_t axis, char *to, const char *from) {
    if (axis == box->dense)
        axis++;
    if (box->dense >= 0 && axis == box->axes - 1) {
        transpose_axes(box, to, from);
        return;
    }
    if (axis == box->axes) {
        if (box->copy_long != NULL)
            box->copy_long(to, from, (size_t)box->unit);
        else
            memmove(to, from, (size_t)box->unit);
        return;
    }
    Py_ssize_t n = box->shape[axis], to_step = box->to_strides[axis], from_step = box->from_strides[axis];
    if (axis + 1 == box->axes && box->copy_long == NULL)
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
    PyThreadState *thread = boxes->lets_others ? PyEval_SaveThread() : NULL;
    for (Py_ssize_t i = 0; i < boxes->count; i++)
        copy(boxes->boxes + i, 0, boxes->boxes[i].to, boxes->boxes[i].from);
    if (thread != NULL) {
        end_stores();
        PyEval_RestoreThread(thread);
    }
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
    int way;
    if (!PyTuple_Check(given) || !PyArg_ParseTuple(given, "KKOOOni", &to, &from, &shape, &to_strides, &from_strides,
                                                   &box->unit, &way))
        return -1;
    box->copy_long = way == PAST_CACHES ? stream_row : way == LONG ? long_row : NULL;
    box->to = (char *)(uintptr_t)to;
    box->from = (const char *)(uintptr_t)from;
    box->axes = PyTuple_Check(shape) ? PyTuple_GET_SIZE(shape) : MOST_AXES + 1;
    if (box->axes > MOST_AXES || box->unit < 1 || read_extents(shape, box->axes, box->shape) < 0 ||
        read_extents(to_strides, box->axes, box->to_strides) < 0 ||
        read_extents(from_strides, box->axes, box->from_strides) < 0)
        return -1;
    box->past = way == TRANSPOSED_PAST_CACHES;
    box->dense = -1;
    if (way != TRANSPOSED && way != TRANSPOSED_PAST_CACHES)
        return 0;
    for (Py_ssize_t axis = box->axes - 2; axis >= 0 && box->dense < 0; axis--)
        if (box->from_strides[axis] == box->unit)
            box->dense = axis;
    int is_known = box->unit == 4 || box->unit == 8 || box->unit == 16;
    return is_known && box->dense >= 0 && box->to_strides[box->axes - 1] == box->unit ? 0 : -1;
}

/* Boxes(boxes, keep): `boxes` are tuples (address to, address from, shape in units, strides to, strides from, bytes
 * of a unit, SHORT or LONG or PAST_CACHES or TRANSPOSED or TRANSPOSED_PAST_CACHES). Of a transposed box the last axis
 * is dense in the destination, another one is in the source, and units are of 4, 8 or 16 bytes. */
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
        } else if (boxes->boxes[i].copy_long != NULL || boxes->boxes[i].dense >= 0)
            boxes->lets_others = 1;
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
    PyModuleDef_HEAD_INIT, "_box", "Copies of boxes, compiled.", 0, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__box(void) {
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&boxes_type);
    if (module == NULL || type == NULL || PyModule_AddObjectRef(module, "Boxes", type) < 0)
        Py_CLEAR(module);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", 2) < 0) /* as compiled.py has it */
        Py_CLEAR(module);
    Py_XDECREF(type);
    return module;
}
