/* Rounds and barriers of a board, each in one call: write, publish, and look for the peers.
 *
 * Rows, words and mailboxes are those of rows.py. Built at installation where there is a C compiler; without
 * it board.py does the same, word by word. Rare cases are left to board.py: a call here looks for peers for a
 * while, sleeps for a while, and returns where one is late or something is wrong; board.py then waits or
 * raises. So nothing here has to handle signals or deadlines.
 *
 * Invariant: a rank that loads a word, which was stored with release, sees what the word's rank wrote before
 * it. A rank comes out when it has seen every peer arrive and then, looking once more, that none has taken
 * its arrival back; with a single peer a second look could find nothing new. See waiting.py.
 *
 * No wake-up is lost. A rank that is about to sleep until a certain peer publishes something writes that
 * peer's number into its own bell, notes how often the peer has rung, and then looks once more for what it
 * waits for. A peer that has published looks at all bells; where it finds its own number it increments its
 * count of rings and wakes the ranks that sleep on that count. These stores and loads are sequentially
 * consistent. So either the sleeper's look sees what was published, or the publisher's look sees the
 * sleeper's bell; and then the count differs from what the sleeper has noted, or it sleeps already and is
 * woken.
 */

#include "board.h"

#include <errno.h>
#include <limits.h>
#include <sched.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "../base/pause.h"

enum { EXCHANGE, BARRIER, BELL = 7 }; /* words */
enum { WORD = 8, HEAD = 3 * WORD, LOOKS_WITH_LOCK = 200, LOOKS = 64, YIELDS = 3, WITHOUT_YIELDS = 300 };

#define LONG_YIELD 3e-4 /* seconds; ranks that only wait give the core back sooner */

/* A rank's bell, which only that rank writes: how often it has rung, and 1 + the number of the peer for which
 * it sleeps, 0 while it is awake. */
typedef struct {
    uint32_t rings, sleeps_for;
} Bell;

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    Py_ssize_t rank, size, row_bytes, mailbox, mailbox_bytes;
    int no_yields; /* waits to come that do not yield */
    double spin, nap; /* seconds to look for a late peer, and then to sleep */
} Page;

static char *row_of(const Page *page, Py_ssize_t rank) {
    return (char *)page->memory.buf + rank * page->row_bytes;
}

static Bell *bell_of(const Page *page, Py_ssize_t rank) {
    return (Bell *)(row_of(page, rank) + BELL * WORD);
}

/* Wake the peers that sleep until this rank publishes something, which it has just done. */
static void ring(const Page *page) {
    int sleeping = 0;
    for (Py_ssize_t rank = 0; rank < page->size; rank++) {
        uint32_t peer = __atomic_load_n(&bell_of(page, rank)->sleeps_for, __ATOMIC_SEQ_CST);
        sleeping = sleeping || peer == (uint32_t)page->rank + 1;
    }
    if (sleeping) {
        uint32_t *rings = &bell_of(page, page->rank)->rings;
        __atomic_fetch_add(rings, 1, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, rings, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

static void publish(const Page *page, Py_ssize_t word, uint64_t value) {
    __atomic_store_n((uint64_t *)row_of(page, page->rank) + word, value, __ATOMIC_SEQ_CST);
    ring(page);
}

/* How often `peer` has rung: noted before the last look at what this rank waits for. */
static uint32_t begin_sleep(const Page *page, Py_ssize_t peer) {
    __atomic_store_n(&bell_of(page, page->rank)->sleeps_for, (uint32_t)peer + 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&bell_of(page, peer)->rings, __ATOMIC_SEQ_CST);
}

static void end_sleep(const Page *page) {
    __atomic_store_n(&bell_of(page, page->rank)->sleeps_for, 0, __ATOMIC_RELAXED);
}

/* Sleep until `peer` rings again, for `seconds` at most. 0 where a signal has come. */
static int sleep_until_it_rings(const Page *page, Py_ssize_t peer, uint32_t rings, double seconds) {
    struct timespec most = {(time_t)seconds, 0};
    most.tv_nsec = (long)(1e9 * (seconds - (double)most.tv_sec));
    return syscall(SYS_futex, &bell_of(page, peer)->rings, FUTEX_WAIT, rings, &most, NULL, 0) == 0 ||
           errno != EINTR;
}

/* Whether all ranks' words have at least that value; the first `*come` are known to. */
static int all_come(const Page *page, Py_ssize_t word, uint64_t value, Py_ssize_t *come) {
    for (; *come < page->size; ++*come) {
        uint64_t *own = (uint64_t *)row_of(page, *come) + word;
        if (__atomic_load_n(own, __ATOMIC_SEQ_CST) < value)
            return 0;
    }
    return 1;
}

static int look(const Page *page, Py_ssize_t word, uint64_t value, Py_ssize_t *come, Py_ssize_t looks) {
    for (Py_ssize_t i = 0; i < looks; i++) {
        if (all_come(page, word, value, come))
            return 1;
        pause_core();
    }
    return 0;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

/* Yield the core a few times, which is quicker than sleeping where a late peer waits for the core. Once another
 * process has kept the core, the next waits do not yield. */
static int look_and_yield(Page *page, Py_ssize_t word, uint64_t value, Py_ssize_t *come) {
    int done = 0;
    for (int i = 0; !done && page->no_yields == 0 && i < YIELDS; i++) {
        double start = now();
        sched_yield();
        if (now() - start > LONG_YIELD)
            page->no_yields = WITHOUT_YIELDS;
        done = all_come(page, word, value, come);
    }
    return done;
}

/* Spin, yield, then sleep until one late peer after the other has come. Returns early, to board.py, at a signal, or
 * where a peer rings that has not come. */
static int look_and_sleep(Page *page, Py_ssize_t word, uint64_t value, Py_ssize_t *come) {
    double start = now(), waited = 0;
    int done = 0, going_on = 1;
    for (; !done && waited < page->spin; waited = now() - start)
        done = look(page, word, value, come, LOOKS);
    if (!done && page->no_yields > 0)
        page->no_yields--;
    else
        done = look_and_yield(page, word, value, come);
    waited = now() - start;
    for (double most = waited + page->nap; !done && going_on && waited < most; waited = now() - start) {
        Py_ssize_t late = *come;
        uint32_t rings = begin_sleep(page, late);
        done = all_come(page, word, value, come);
        if (done || *come > late)
            continue;
        going_on = sleep_until_it_rings(page, late, rings, most - waited);
        done = all_come(page, word, value, come);
        going_on = going_on && *come > late;
    }
    end_sleep(page);
    return done;
}

/* Whether all come out. Other Python threads run meanwhile, unless all have arrived already. */
static int await_all(Page *page, Py_ssize_t word, uint64_t value) {
    Py_ssize_t come = 0;
    int done = look(page, word, value, &come, LOOKS_WITH_LOCK);
    if (!done) {
        Py_BEGIN_ALLOW_THREADS
        done = look_and_sleep(page, word, value, &come);
        Py_END_ALLOW_THREADS
    }
    if (done && page->size > 2) {
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        come = 0;
        done = all_come(page, word, value, &come);
    }
    return done;
}

/* Read a rank's mailbox. False where it is of another round, or its text continues in the next one: board.py
 * handles these. */
static int open_mail(const Page *page, Py_ssize_t rank, Py_ssize_t mailbox, uint64_t number, Mail *mail) {
    const char *from = row_of(page, rank) + mailbox;
    uint64_t head[3]; /* round, bytes in all, bytes of the payload at their end */
    memcpy(head, from, sizeof head);
    Py_ssize_t text = (Py_ssize_t)(head[1] - head[2]);
    *mail = (Mail){from + HEAD, from + HEAD + text, text, (Py_ssize_t)head[2]};
    return head[0] == number && head[1] <= (uint64_t)(page->mailbox_bytes - HEAD) && head[2] <= head[1];
}

static PyObject *text_of(const Mail *mail) {
    return PyBytes_FromStringAndSize(mail->text, mail->text_bytes);
}

static PyObject *payload_of(const Mail *mail) {
    return PyBytes_FromStringAndSize(mail->payload, mail->payload_bytes);
}

static int is_expected(PyObject *expected, Py_ssize_t rank, const Mail *mail) {
    PyObject *text = rank < PyTuple_GET_SIZE(expected) ? PyTuple_GET_ITEM(expected, rank) : NULL;
    return text != NULL && PyBytes_Check(text) && PyBytes_GET_SIZE(text) == mail->text_bytes &&
           memcmp(PyBytes_AS_STRING(text), mail->text, (size_t)mail->text_bytes) == 0;
}

/* A tuple of the objects that `made` makes of all ranks' mailboxes. */
static PyObject *made_of_all(const Page *page, Py_ssize_t mailbox, uint64_t number,
                             PyObject *(*made)(const Mail *)) {
    PyObject *all = PyTuple_New(page->size);
    for (Py_ssize_t rank = 0; all != NULL && rank < page->size; rank++) {
        Mail mail;
        open_mail(page, rank, mailbox, number, &mail);
        PyObject *one = made(&mail);
        if (one == NULL)
            Py_CLEAR(all);
        else
            PyTuple_SET_ITEM(all, rank, one);
    }
    return all;
}

/* (texts, payloads) of all ranks; the texts are the object `expected` where they are equal to it. None where
 * board.py has to read them. */
static PyObject *read_all(const Page *page, Py_ssize_t mailbox, uint64_t number, PyObject *expected) {
    int as_expected = PyTuple_Check(expected) && PyTuple_GET_SIZE(expected) == page->size;
    for (Py_ssize_t rank = 0; rank < page->size; rank++) {
        Mail mail;
        if (!open_mail(page, rank, mailbox, number, &mail))
            Py_RETURN_NONE;
        as_expected = as_expected && is_expected(expected, rank, &mail);
    }
    PyObject *texts = as_expected ? Py_NewRef(expected) : made_of_all(page, mailbox, number, text_of);
    PyObject *payloads = made_of_all(page, mailbox, number, payload_of);
    PyObject *both = texts == NULL || payloads == NULL ? NULL : PyTuple_Pack(2, texts, payloads);
    Py_XDECREF(texts);
    Py_XDECREF(payloads);
    return both;
}

static Py_ssize_t mailbox_of(const Page *page, uint64_t number) {
    return page->mailbox + (Py_ssize_t)(number & 1) * page->mailbox_bytes;
}

/* Publish a round: whether all ranks have. -1 for a message too long for a mailbox. */
static int met(Page *page, uint64_t number, const Mail *own) {
    Py_ssize_t text = own->text_bytes, payload = own->payload_bytes;
    if (text + payload > page->mailbox_bytes - HEAD)
        return -1;
    char *mail = row_of(page, page->rank) + mailbox_of(page, number);
    uint64_t head[3] = {number, (uint64_t)(text + payload), (uint64_t)payload};
    memcpy(mail, head, sizeof head);
    memcpy(mail + HEAD, own->text, (size_t)text);
    memcpy(mail + HEAD + text, own->payload, (size_t)payload);
    publish(page, EXCHANGE, 2 * number);
    return await_all(page, EXCHANGE, 2 * number);
}

static int exchange_mail(PyObject *self, uint64_t number, const Mail *own, Mail *all) {
    Page *page = (Page *)self;
    int done = met(page, number, own);
    for (Py_ssize_t rank = 0; done > 0 && rank < page->size; rank++)
        done = open_mail(page, rank, mailbox_of(page, number), number, all + rank);
    return done;
}

/* exchange(number, text, payload, expected): round `number`, with a message that fits a mailbox. */
static PyObject *exchange(Page *page, PyObject *const *given, Py_ssize_t count) {
    if (count != 4 || !PyBytes_Check(given[1]) || !PyBytes_Check(given[2])) {
        PyErr_SetString(PyExc_TypeError, "exchange(number, text, payload, expected)");
        return NULL;
    }
    uint64_t number = PyLong_AsUnsignedLongLong(given[0]);
    if (PyErr_Occurred())
        return NULL;
    Mail own = {PyBytes_AS_STRING(given[1]), PyBytes_AS_STRING(given[2]), PyBytes_GET_SIZE(given[1]),
                PyBytes_GET_SIZE(given[2])};
    int done = met(page, number, &own);
    if (done < 0) {
        PyErr_SetString(PyExc_ValueError, "a text that no mailbox holds");
        return NULL;
    }
    if (!done)
        Py_RETURN_NONE;
    return read_all(page, mailbox_of(page, number), number, given[3]);
}

static int arrive_at(PyObject *self, uint64_t number) {
    Page *page = (Page *)self;
    publish(page, BARRIER, 2 * number);
    return await_all(page, BARRIER, 2 * number);
}

/* arrive(number): set this rank's word of a barrier; whether all peers have arrived. */
static PyObject *arrive(PyObject *page, PyObject *given) {
    uint64_t number = PyLong_AsUnsignedLongLong(given);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(arrive_at(page, number));
}

/* ring(): wake the peers that sleep until this rank publishes something, which it has just done. */
static PyObject *ring_bell(const Page *page, PyObject *none) {
    (void)none;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    ring(page);
    Py_RETURN_NONE;
}

/* begin_sleep(peer): how often it has rung. The caller then looks once more for what it waits for. */
static PyObject *begin_to_sleep(const Page *page, PyObject *given) {
    Py_ssize_t peer = PyNumber_AsSsize_t(given, PyExc_OverflowError);
    if (peer == -1 && PyErr_Occurred())
        return NULL;
    if (peer < 0 || peer >= page->size) {
        PyErr_SetString(PyExc_ValueError, "no such peer");
        return NULL;
    }
    uint32_t rings = begin_sleep(page, peer);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return PyLong_FromUnsignedLong(rings);
}

/* sleep(peer, rings, seconds): until it rings again, for `seconds` at most; a signal ends it. */
static PyObject *sleep_for(const Page *page, PyObject *given) {
    Py_ssize_t peer;
    unsigned int rings;
    double seconds;
    if (!PyArg_ParseTuple(given, "nId", &peer, &rings, &seconds))
        return NULL;
    if (peer < 0 || peer >= page->size || !(seconds >= 0 && seconds < 1e9)) {
        PyErr_SetString(PyExc_ValueError, "no such peer, or time");
        return NULL;
    }
    if (seconds > 0) {
        Py_BEGIN_ALLOW_THREADS
        sleep_until_it_rings(page, peer, rings, seconds);
        Py_END_ALLOW_THREADS
    }
    end_sleep(page);
    Py_RETURN_NONE;
}

/* Page(memory, rank, size, row_bytes, mailbox, mailbox_bytes, spin, nap) */
static PyObject *make(PyTypeObject *type, PyObject *arguments, PyObject *named) {
    Page *page = (Page *)type->tp_alloc(type, 0);
    if (page == NULL)
        return NULL;
    if ((named != NULL && PyDict_GET_SIZE(named)) ||
        !PyArg_ParseTuple(arguments, "w*nnnnndd", &page->memory, &page->rank, &page->size,
                          &page->row_bytes, &page->mailbox, &page->mailbox_bytes, &page->spin, &page->nap)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a page takes no names");
        Py_DECREF(page);
        return NULL;
    }
    if (page->rank < 0 || page->rank >= page->size || page->mailbox < (BELL + 1) * WORD ||
        page->mailbox_bytes < HEAD || page->row_bytes < page->mailbox ||
        (page->row_bytes - page->mailbox) / 2 < page->mailbox_bytes ||
        page->memory.len / page->size < page->row_bytes || page->row_bytes % WORD ||
        page->mailbox % WORD || (uintptr_t)page->memory.buf % WORD ||
        !(page->spin >= 0 && page->spin < 1e9 && page->nap >= 0 && page->nap < 1e9)) {
        PyErr_SetString(PyExc_ValueError, "no such rows, mailboxes or times");
        Py_DECREF(page);
        return NULL;
    }
    return (PyObject *)page;
}

static void drop(Page *page) {
    PyTypeObject *type = Py_TYPE(page);
    if (page->memory.obj != NULL)
        PyBuffer_Release(&page->memory);
    type->tp_free(page);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"exchange", (PyCFunction)(void (*)(void))exchange, METH_FASTCALL,
     "All ranks' texts and payloads in a round; None if board.py has to go on."},
    {"arrive", arrive, METH_O, "Set this rank's word; whether all peers were seen to arrive."},
    {"ring", (PyCFunction)ring_bell, METH_NOARGS, "Wake the peers that sleep until this rank publishes something."},
    {"begin_sleep", (PyCFunction)begin_to_sleep, METH_O, "How often a peer has rung, before the last look."},
    {"sleep", (PyCFunction)sleep_for, METH_VARARGS, "Sleep until a peer has rung again, for up to so many seconds."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The rows that all ranks of a host share, as seen by one of them."},
    {Py_tp_new, make},
    {Py_tp_dealloc, drop},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec page_type = {"shardmath.symmetric._board.Page", sizeof(Page), 0, Py_TPFLAGS_DEFAULT,
                                slots};

static PyTypeObject *kind_of_pages;

static Py_ssize_t size_of(PyObject *page) {
    return Py_TYPE(page) == kind_of_pages ? ((const Page *)page)->size : -1;
}

static const Rounds rounds = {size_of, exchange_mail, arrive_at};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_board", "Rounds of a board, compiled.", 0, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__board(void) {
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&page_type);
    PyObject *capsule = PyCapsule_New((void *)&rounds, ROUNDS, NULL);
    if (module == NULL || type == NULL || PyModule_AddObjectRef(module, "Page", type) < 0 ||
        PyModule_AddObjectRef(module, "ROUNDS", capsule) < 0 ||
        PyModule_AddIntConstant(module, "INTERFACE", 3) < 0) /* as compiled.py has it */
        Py_CLEAR(module);
    kind_of_pages = (PyTypeObject *)type; /* the module keeps it alive */
    Py_XDECREF(capsule);
    Py_XDECREF(type);
    return module;
}
