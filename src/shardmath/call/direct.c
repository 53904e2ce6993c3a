/* A call that comes again as it was on all ranks: recognised, agreed on and performed in one call.
 *
 * Built when the package is installed where there is a C compiler; without it the driver does the same, step
 * by step. Whatever is not as it was the last time is left to the driver: either nothing has been done then,
 * or the ranks have exchanged their texts, and what they do next follows from those.
 *
 * Invariant: nothing is published before the call that is under way is noted with the board, and no line of
 * Python runs between a word that is published and the count of rounds or barriers that follows from it; so
 * no signal handler does. What waits long is left to board.py.
 *
 * What is known of a call is a tuple (see compiled.py), as is what all calls of a driver share.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

/* What is known of a call. */
enum {
    LOOKS,    /* of its arrays, as the fingerprint has them */
    WORDS,    /* its words, options and numbers */
    KNOWN,    /* which holds while the blocks of the heap do that the arrays lie in */
    MADE,     /* the plans made when it was agreed on */
    MEMORY,   /* the workspace, and its version then; None where nothing lies there */
    ENTRY,    /* of the plan among all plans: value, number of its last use */
    OPERATION,
    TEXT,     /* what this rank sends, and */
    TEXTS,    /* what all send */
    PAYLOAD,  /* makes what is sent along; None for nothing */
    BEFORE,   /* steps before the exchange */
    NEW,      /* makes the new result, or (result, where it lies); None where none is */
    RESULT,   /* which one it is */
    STEPS,    /* what follows the exchange, by the look of the new result; None is a barrier */
    BIND,     /* makes those steps, for a new result; None where the driver is to make the call */
    RECEIVE,  /* where all payloads are put first, a buffer; or how they are summed: see `sum_into` */
    BEGUN,    /* what the driver makes the rest of, where others send other texts */
    FIELDS
};

/* What all calls of a driver share. */
enum { LOOK, CONTEXT, BOARD, HEAP, PLANS, USES, THREAD, TELLS, ACQUIRE, RELEASE, EXCHANGE, ARRIVE, SHARED };

enum { OPERANDS, RESULTS, GIVEN_WORDS, OPTIONS, STREAM, NUMBERS, ARGUMENTS };

enum { EXCHANGE_WORD, BARRIER_WORD };

enum { PLACES = 64 }; /* of new results of which the steps are kept */

static const char *const texts[] = {"closed", "failure", "made", "version", "call", "finished", "thread", "boards",
                                    "operation", "rounds", "barriers", "_uses", "holds", "late", "late_barrier",
                                    "data_ptr"};
enum { s_closed, s_failure, s_made, s_version, s_call, s_finished, s_thread, s_boards, s_operation, s_rounds,
       s_barriers, s_uses, s_holds, s_late, s_late_barrier, s_data_ptr, NAMES };
static PyObject *names[NAMES], *no_payload, *information;

#define ITEM(tuple, index) PyTuple_GET_ITEM(tuple, index)

/* -- recognised ------------------------------------------------------------------------------------------ */

/* Whether two words are one, or equal and of one type that never changes; tuples of such, likewise. */
static int same_words(PyObject *one, PyObject *other) {
    if (one == other)
        return 1;
    if (Py_TYPE(one) != Py_TYPE(other))
        return 0;
    if (PyTuple_Check(one)) {
        if (PyTuple_GET_SIZE(one) != PyTuple_GET_SIZE(other))
            return 0;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(one); i++)
            if (!same_words(ITEM(one, i), ITEM(other, i)))
                return 0;
        return 1;
    }
    if (PyFloat_CheckExact(one)) {
        double a = PyFloat_AS_DOUBLE(one), b = PyFloat_AS_DOUBLE(other);
        return memcmp(&a, &b, sizeof a) == 0;
    }
    if (PyUnicode_CheckExact(one) || PyLong_CheckExact(one) || PyBytes_CheckExact(one))
        return PyObject_RichCompareBool(one, other, Py_EQ) == 1;
    return 0;
}

/* A number that equal looks and words share. */
static uint64_t number_of(PyObject *one, uint64_t so_far) {
    uint64_t own = (uint64_t)(uintptr_t)Py_TYPE(one);
    if (PyTuple_Check(one))
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(one); i++)
            so_far = number_of(ITEM(one, i), so_far);
    else if (PyBytes_CheckExact(one) || PyLong_CheckExact(one) || PyUnicode_CheckExact(one))
        own += (uint64_t)PyObject_Hash(one);
    so_far = (so_far ^ own) * 0x9E3779B97F4A7C15u;
    return so_far ^ so_far >> 29;
}

static PyObject *key_of(PyObject *looks, PyObject *words) {
    return PyLong_FromUnsignedLongLong(number_of(words, number_of(looks, 0)));
}

/* key(looks, words): where a call is kept. */
static PyObject *key(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    (void)module;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "key(looks, words)");
        return NULL;
    }
    return key_of(given[0], given[1]);
}

/* What the arrays look like; NULL where that takes a closer look, with no error but what is no one's fault. */
static PyObject *look(PyObject *shared, PyObject *operands, PyObject *results) {
    PyObject *arrays[] = {NULL, operands, results};
    PyObject *found = PyObject_Vectorcall(ITEM(shared, LOOK), arrays + 1,
                                          2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    if (found == NULL) {
        if (PyErr_ExceptionMatches(PyExc_TypeError) || PyErr_ExceptionMatches(PyExc_ValueError) ||
            PyErr_ExceptionMatches(PyExc_RuntimeError))
            PyErr_Clear();
        return NULL;
    }
    if (PyTuple_CheckExact(found))
        return found;
    Py_DECREF(found);
    return NULL;
}

/* The call among those that are kept, a new reference; NULL if it is not there. */
static PyObject *recognised(PyObject *shared, PyObject *kept, PyObject *arguments) {
    if (!PyTuple_Check(arguments) || PyTuple_GET_SIZE(arguments) != ARGUMENTS ||
        ITEM(arguments, STREAM) != Py_None)
        return NULL;
    PyObject *looks = look(shared, ITEM(arguments, OPERANDS), ITEM(arguments, RESULTS));
    if (looks == NULL)
        return NULL;
    PyObject *call = NULL;
    PyObject *words = PyTuple_Pack(3, ITEM(arguments, GIVEN_WORDS), ITEM(arguments, OPTIONS),
                                   ITEM(arguments, NUMBERS));
    PyObject *number = words == NULL ? NULL : key_of(looks, words);
    if (number != NULL)
        call = PyDict_GetItemWithError(kept, number);
    if (call != NULL && (PyObject_RichCompareBool(looks, ITEM(call, LOOKS), Py_EQ) != 1 ||
                         !same_words(words, ITEM(call, WORDS))))
        call = NULL;
    Py_XINCREF(call);
    Py_XDECREF(number);
    Py_XDECREF(words);
    Py_DECREF(looks);
    return call;
}

/* -- as it was ------------------------------------------------------------------------------------------- */

/* Whether an attribute is that very object. */
static int is(PyObject *owner, int name, PyObject *object) {
    PyObject *found = PyObject_GetAttr(owner, names[name]);
    Py_XDECREF(found); /* its owner has it */
    return found != NULL && found == object;
}

/* Whether an attribute equals that object; -1 with an error. */
static int equal(PyObject *owner, int name, PyObject *object) {
    PyObject *value = PyObject_GetAttr(owner, names[name]);
    int same = value == NULL ? -1 : PyObject_RichCompareBool(value, object, Py_EQ);
    Py_XDECREF(value);
    return same;
}

static int truth(PyObject *found) {
    int is_true = found == NULL ? -1 : PyObject_IsTrue(found);
    Py_XDECREF(found);
    return is_true;
}

static int blocks_hold(PyObject *shared, PyObject *known) {
    PyObject *version = PyObject_GetAttr(ITEM(shared, HEAP), names[s_version]);
    int same = version == NULL ? -1 : equal(known, s_version, version);
    Py_XDECREF(version);
    if (same != 0)
        return same == 1;
    return truth(PyObject_CallMethodOneArg(known, names[s_holds], ITEM(shared, HEAP))) == 1;
}

static int as_it_was(PyObject *shared, PyObject *call) {
    return is(ITEM(shared, CONTEXT), s_closed, Py_None) && is(ITEM(shared, BOARD), s_failure, Py_None) &&
           is(ITEM(shared, PLANS), s_made, ITEM(call, MADE)) &&
           (ITEM(call, MEMORY) == Py_None ||
            equal(ITEM(ITEM(call, MEMORY), 0), s_version, ITEM(ITEM(call, MEMORY), 1)) == 1) &&
           blocks_hold(shared, ITEM(call, KNOWN)) &&
           truth(PyObject_CallOneArg(ITEM(shared, TELLS), information)) == 0;
}

/* Note that the call under way uses the board, as Board.enter does: 1, 0 where that is not so simple. */
static int enter(PyObject *shared) {
    PyObject *board = ITEM(shared, BOARD), *call = PyObject_GetAttr(ITEM(shared, THREAD), names[s_call]);
    if (call == NULL || call == Py_None) {
        Py_XDECREF(call);
        return 0;
    }
    int entered = is(board, s_call, call);
    if (!entered) {
        PyObject *last = PyObject_GetAttr(board, names[s_call]);
        int free_ = last != NULL && (last == Py_None || is(last, s_finished, Py_True));
        Py_XDECREF(last);
        PyObject *boards = free_ ? PyObject_GetAttr(call, names[s_boards]) : NULL;
        PyObject *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
        entered = boards != NULL && thread != NULL && PyList_CheckExact(boards) &&
                  PyObject_SetAttr(call, names[s_thread], thread) == 0 && PyList_Append(boards, board) == 0 &&
                  PyObject_SetAttr(board, names[s_call], call) == 0;
        Py_XDECREF(boards);
        Py_XDECREF(thread);
    }
    Py_DECREF(call);
    return entered;
}

/* -- performed ------------------------------------------------------------------------------------------- */

/* The number that follows a count of the board; 0 with an error. */
static uint64_t next_number(PyObject *board, int name) {
    PyObject *found = PyObject_GetAttr(board, names[name]);
    uint64_t number = found == NULL ? 0 : PyLong_AsUnsignedLongLong(found) + 1;
    Py_XDECREF(found);
    return PyErr_Occurred() ? 0 : number;
}

static int set_number(PyObject *board, int name, PyObject *number) {
    return PyObject_SetAttr(board, names[name], number);
}

/* (texts, payloads) of all ranks. */
static PyObject *exchanged(PyObject *shared, PyObject *call, PyObject *payload) {
    PyObject *board = ITEM(shared, BOARD), *found = NULL;
    uint64_t next = next_number(board, s_rounds);
    if (next == 0)
        return NULL;
    PyObject *word = PyLong_FromLong(EXCHANGE_WORD), *value = PyLong_FromUnsignedLongLong(2 * next);
    PyObject *number = PyLong_FromUnsignedLongLong(next);
    if (word != NULL && value != NULL && number != NULL) {
        PyObject *given[] = {NULL, word, value, number, ITEM(call, TEXT), payload, ITEM(call, TEXTS)};
        found = PyObject_Vectorcall(ITEM(shared, EXCHANGE), given + 1, 6 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    if (found == Py_None) { /* a peer is late */
        Py_DECREF(found);
        found = PyObject_CallMethodObjArgs(board, names[s_late], ITEM(call, TEXT), payload, ITEM(call, TEXTS), NULL);
    } else if (found != NULL && set_number(board, s_rounds, number) < 0)
        Py_CLEAR(found);
    Py_XDECREF(word);
    Py_XDECREF(value);
    Py_XDECREF(number);
    if (found != NULL && (!PyTuple_CheckExact(found) || PyTuple_GET_SIZE(found) != 2)) {
        PyErr_SetString(PyExc_TypeError, "an exchange gives texts and payloads");
        Py_CLEAR(found);
    }
    return found;
}

static int meet(PyObject *shared) {
    PyObject *board = ITEM(shared, BOARD);
    uint64_t next = next_number(board, s_barriers);
    if (next == 0)
        return -1;
    PyObject *word = PyLong_FromLong(BARRIER_WORD), *value = PyLong_FromUnsignedLongLong(2 * next);
    PyObject *number = PyLong_FromUnsignedLongLong(next);
    int done = -1;
    if (word != NULL && value != NULL && number != NULL) {
        PyObject *given[] = {NULL, word, value};
        done = truth(PyObject_Vectorcall(ITEM(shared, ARRIVE), given + 1, 2 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL));
        if (done == 0)
            done = truth(PyObject_CallMethodOneArg(board, names[s_late_barrier], value));
        if (done == 1 && set_number(board, s_barriers, number) < 0)
            done = -1;
    }
    Py_XDECREF(word);
    Py_XDECREF(value);
    Py_XDECREF(number);
    return done == 1 ? 0 : -1;
}

static int run(PyObject *shared, PyObject *steps) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++) {
        PyObject *step = ITEM(steps, i);
        if (step == Py_None) {
            if (meet(shared) < 0)
                return -1;
            continue;
        }
        PyObject *done = PyObject_CallNoArgs(step);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
    }
    return 0;
}

/* The new result of a call, and where it lies if that is known: new references. */
static PyObject *new_result(PyObject *call, PyObject **place) {
    PyObject *made = PyObject_CallNoArgs(ITEM(call, NEW));
    if (made == NULL || !PyTuple_CheckExact(made) || PyTuple_GET_SIZE(made) != 2)
        return made;
    PyObject *result = Py_NewRef(ITEM(made, 0));
    *place = Py_NewRef(ITEM(made, 1));
    Py_DECREF(made);
    return result;
}

/* What the call binds to a result, a new reference: a tuple; None where the driver is to make the call. */
static PyObject *bound(PyObject *call, PyObject *result) {
    PyObject *steps = PyObject_CallOneArg(ITEM(call, BIND), result);
    if (steps != NULL && steps != Py_None && !PyTuple_CheckExact(steps)) {
        PyErr_SetString(PyExc_TypeError, "the steps of a call are a tuple, or None");
        Py_CLEAR(steps);
    }
    return steps;
}

/* The steps that end in this result, a new reference: those of the last results that lay there; as `bound`. */
static PyObject *steps_into(PyObject *shared, PyObject *call, PyObject *made, PyObject *place) {
    PyObject *by_place = ITEM(call, STEPS), *looks = NULL;
    if (made == NULL)
        place = Py_None;
    else if (place == NULL) {
        PyObject *one = PyTuple_Pack(1, made), *none = PyTuple_New(0);
        looks = one == NULL || none == NULL ? NULL : look(shared, one, none);
        Py_XDECREF(one);
        Py_XDECREF(none);
        if (PyErr_Occurred())
            return NULL;
        if (looks == NULL) /* its place cannot be told */
            return bound(call, made);
        place = ITEM(looks, 0);
    }
    if (PyDict_GET_SIZE(by_place) >= PLACES)
        PyDict_Clear(by_place);
    PyObject *steps = PyDict_GetItemWithError(by_place, place);
    if (steps != NULL)
        Py_INCREF(steps);
    else if (!PyErr_Occurred()) {
        steps = bound(call, made == NULL ? Py_None : made);
        if (steps != NULL && steps != Py_None && PyDict_SetItem(by_place, place, steps) < 0)
            Py_CLEAR(steps);
    }
    Py_XDECREF(looks);
    return steps;
}

/* This plan is the one used last: see LRUCache. */
static int use(PyObject *shared, PyObject *entry) {
    PyObject *uses = ITEM(shared, USES), *last = PyObject_GetAttr(uses, names[s_uses]), *next = NULL;
    if (last != NULL)
        next = PyLong_FromUnsignedLongLong(PyLong_AsUnsignedLongLong(last) + 1);
    int failed = next == NULL || PyErr_Occurred() || PyObject_SetAttr(uses, names[s_uses], next) < 0;
    Py_XDECREF(last);
    if (failed) {
        Py_XDECREF(next);
        return -1;
    }
    return PyList_SetItem(entry, 1, next);
}

/* Put all ranks' payloads into a buffer, one after the other. */
static int put(PyObject *payloads, PyObject *buffer) {
    Py_buffer room;
    if (PyObject_GetBuffer(buffer, &room, PyBUF_WRITABLE) < 0)
        return -1;
    Py_ssize_t begin = 0, size = PyTuple_GET_SIZE(payloads);
    for (Py_ssize_t rank = 0; rank < size; rank++)
        begin += PyBytes_GET_SIZE(ITEM(payloads, rank));
    int fits = begin == room.len;
    for (Py_ssize_t rank = size; fits && rank-- > 0;) {
        begin -= PyBytes_GET_SIZE(ITEM(payloads, rank));
        memcpy((char *)room.buf + begin, PyBytes_AS_STRING(ITEM(payloads, rank)),
               (size_t)PyBytes_GET_SIZE(ITEM(payloads, rank)));
    }
    PyBuffer_Release(&room);
    if (!fits)
        PyErr_SetString(PyExc_ValueError, "payloads of other lengths than agreed on");
    return fits ? 0 : -1;
}

/* Add what all ranks have sent along into the result. `how` is (address of a function of sum.c, bytes of the
 * result, where they begin in each payload); the result's memory is in C order. */
static int sum_into(PyObject *payloads, PyObject *how, PyObject *result) {
    void (*sum)(int, const char *const *, int, char *const *, int64_t) = NULL;
    void *address = PyLong_AsVoidPtr(ITEM(how, 0));
    Py_ssize_t nbytes = PyLong_AsSsize_t(ITEM(how, 1)), begin = PyLong_AsSsize_t(ITEM(how, 2));
    Py_ssize_t size = PyTuple_GET_SIZE(payloads);
    char *target = NULL;
    Py_buffer room = {0};
    memcpy(&sum, &address, sizeof sum);
    if (PyErr_Occurred())
        return -1;
    if (!PyObject_CheckBuffer(result)) { /* a tensor */
        PyObject *place = PyObject_CallMethodNoArgs(result, names[s_data_ptr]);
        target = place == NULL ? NULL : PyLong_AsVoidPtr(place);
        Py_XDECREF(place);
    } else if (PyObject_GetBuffer(result, &room, PyBUF_WRITABLE) == 0)
        target = room.len == nbytes ? room.buf : NULL;
    const char **sources = PyMem_New(const char *, size);
    for (Py_ssize_t rank = 0; sources != NULL && rank < size; rank++) {
        sources[rank] = PyBytes_AS_STRING(ITEM(payloads, rank)) + begin;
        if (PyBytes_GET_SIZE(ITEM(payloads, rank)) < begin + nbytes)
            target = NULL;
    }
    if (target != NULL && sources != NULL)
        sum((int)size, sources, 1, &target, nbytes);
    else if (!PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "payloads, or a result, of other lengths than agreed on");
    PyMem_Free(sources);
    if (room.obj != NULL)
        PyBuffer_Release(&room);
    return PyErr_Occurred() ? -1 : 0;
}

/* What the call returns, a new reference. */
static PyObject *result_of(PyObject *call, PyObject *results, PyObject *made) {
    Py_ssize_t count = PyTuple_GET_SIZE(results);
    if (count == 1)
        return Py_NewRef(made == NULL ? ITEM(results, 0) : made);
    PyObject *all = PyTuple_New(count);
    Py_ssize_t place = made == NULL ? -1 : PyLong_AsSsize_t(ITEM(call, RESULT));
    for (Py_ssize_t i = 0; all != NULL && i < count; i++)
        PyTuple_SET_ITEM(all, i, Py_NewRef(i == place ? made : ITEM(results, i)));
    return all;
}

/* The call, when the board is this thread's. */
static PyObject *perform(PyObject *shared, PyObject *call, PyObject *arguments, PyObject *otherwise,
                         int *left) {
    PyObject *board = ITEM(shared, BOARD), *made = NULL, *found = NULL, *steps = NULL, *given = NULL;
    PyObject *payload = NULL, *place = NULL;
    int under_way = equal(board, s_operation, ITEM(call, OPERATION));
    if (under_way < 0 ||
        (under_way == 0 && PyObject_SetAttr(board, names[s_operation], ITEM(call, OPERATION)) < 0))
        return NULL;
    if (run(shared, ITEM(call, BEFORE)) < 0)
        return NULL;
    if ((ITEM(call, NEW) != Py_None && (made = new_result(call, &place)) == NULL) ||
        (ITEM(call, BIND) != Py_None && (steps = steps_into(shared, call, made, place)) == NULL)) {
        *left = PyErr_ExceptionMatches(PyExc_Exception); /* the driver finds it again, and tells the others */
        if (*left)
            PyErr_Clear();
        goto end;
    }
    *left = steps == Py_None;
    if (*left)
        goto end;
    payload = ITEM(call, PAYLOAD) == Py_None ? Py_NewRef(no_payload) : PyObject_CallNoArgs(ITEM(call, PAYLOAD));
    found = payload == NULL ? NULL : exchanged(shared, call, payload);
    if (found == NULL)
        goto end;
    if (ITEM(found, 0) != ITEM(call, TEXTS)) {
        PyObject *all[] = {NULL, ITEM(call, BEGUN), arguments, made == NULL ? Py_None : made, payload,
                           ITEM(found, 0), ITEM(found, 1)};
        given = PyObject_Vectorcall(otherwise, all + 1, 6 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
        goto end;
    }
    if (use(shared, ITEM(call, ENTRY)) < 0)
        goto end;
    PyObject *receive = ITEM(call, RECEIVE), *payloads = ITEM(found, 1);
    if (PyTuple_CheckExact(receive)) {
        if (sum_into(payloads, receive, made == NULL ? ITEM(ITEM(arguments, RESULTS), 0) : made) < 0)
            goto end;
    } else if (receive != Py_None && put(payloads, receive) < 0)
        goto end;
    if (steps != NULL && run(shared, steps) < 0)
        goto end;
    given = result_of(call, ITEM(arguments, RESULTS), made);
end:
    Py_XDECREF(place);
    Py_XDECREF(made);
    Py_XDECREF(payload);
    Py_XDECREF(found);
    Py_XDECREF(steps);
    return given;
}

/* direct(shared, kept, arguments, otherwise): the results of the call; None where the driver is to make it.
 * After an exchange in which a rank has sent another text it is `otherwise` that gives the results. */
static PyObject *direct(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    (void)module;
    if (count != 4 || !PyTuple_CheckExact(given[0]) || PyTuple_GET_SIZE(given[0]) != SHARED ||
        !PyDict_CheckExact(given[1])) {
        PyErr_SetString(PyExc_TypeError, "direct(what calls share, calls, arguments, otherwise)");
        return NULL;
    }
    PyObject *shared = given[0], *call = recognised(shared, given[1], given[2]), *found = NULL;
    if (call == NULL)
        goto nothing;
    if (!as_it_was(shared, call))
        goto nothing;
    PyObject *locked = PyObject_CallOneArg(ITEM(shared, ACQUIRE), Py_False);
    if (truth(locked) != 1)
        goto nothing;
    int left = 0, entered = enter(shared);
    if (entered)
        found = perform(shared, call, given[2], given[3], &left);
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *released = PyObject_CallNoArgs(ITEM(shared, RELEASE));
    if (released == NULL)
        Py_CLEAR(found);
    Py_XDECREF(released);
    if (kind != NULL) {
        PyErr_Clear();
        PyErr_Restore(kind, value, trace);
    }
    if (found != NULL || (entered && !left)) {
        Py_DECREF(call);
        return found;
    }
nothing:
    Py_XDECREF(call);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"direct", (PyCFunction)(void (*)(void))direct, METH_FASTCALL,
     "Make a call that was made before; None where it is another, and nothing was done."},
    {"key", (PyCFunction)(void (*)(void))key, METH_FASTCALL, "Where a call is kept."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_direct", "Calls that come again, compiled.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__direct(void) {
    for (int i = 0; i < NAMES; i++)
        if ((names[i] = PyUnicode_InternFromString(texts[i])) == NULL)
            return NULL;
    no_payload = PyBytes_FromStringAndSize(NULL, 0);
    information = PyLong_FromLong(20); /* logging.INFO */
    PyObject *module = no_payload == NULL || information == NULL ? NULL : PyModule_Create(&definition);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", 4) < 0) /* as compiled.py has it */
        Py_CLEAR(module);
    return module;
}
