/* A call that comes again unchanged on all ranks: recognised, agreed on and performed in one compiled call.
 *
 * Built at installation where there is a C compiler; without it the driver does the same, step by step. If
 * anything has changed since the last time, the call is left to the driver: either nothing has been done by
 * then, or the ranks have exchanged their texts, and the driver goes on from those.
 *
 * Invariant: the call is noted with the board before any word is published. No line of Python, and so no
 * signal handler, runs between a published word and the count of rounds or barriers that follows from it.
 * Long waits are left to board.py.
 *
 * What is known of a call is a tuple, and so is what all calls of a driver share: compiled.py makes both.
 */

#include "../arrays/attributes.h"
#include "../base/ndarray.h"
#include "../base/record.h"
#include "../symmetric/board.h"

#include <string.h>

/* What is known of a call. */
enum {
    LOOKS,    /* fingerprint of the arrays */
    WORDS,    /* words, options and numbers of the call */
    KNOWN,    /* the heap's blocks in which the arrays lie: all this holds while they do */
    MADE,     /* the number of plans when the ranks agreed on the call */
    MEMORY,   /* (workspace, its version then); None if no workspace is used */
    ENTRY,    /* the plan's entry among all plans: value, number of its last use */
    OPERATION,
    TEXT,     /* the text that this rank sends */
    TEXTS,    /* the texts of all ranks */
    PAYLOAD,  /* what is sent along: a memoryview, or a function that returns bytes; None for nothing */
    BEFORE,   /* steps before the exchange */
    NEW,      /* makes the new result, or (result, its address); None if there is no new result */
    RESULT,   /* the number of the new result */
    STEPS,    /* steps after the exchange, by the look of the new result; None is a barrier */
    BIND,     /* makes these steps for a new result, or gives None if the driver has to make the call */
    HOME,     /* where results at new places are copied from, see below; or None */
    RECEIVE,  /* a buffer for all payloads, or how they are summed: see `sum_into` */
    BEGUN,    /* what the driver needs to go on, if other ranks send other texts */
    FIELDS
};

/* Memory from which a result at a new place is copied. */
enum {
    HOME_MEMORY, /* keeps it */
    HOME_ADDRESS,
    HOME_BYTES,
    HOME_STEPS, /* write to it */
    HOME_OFTEN, /* so many results at one place are copied; then steps are bound to the place */
    HOME_COPIER /* how it is copied: see `copy_by` */
};

/* What all calls of a driver share. */
enum {
    LOOK,
    CONTEXT,
    BOARD,
    HEAP,
    PLANS,
    USES,
    THREAD, /* has the public call that this thread is in, of type */
    RECORD,
    TOLD,   /* the logger's cache of levels that are enabled */
    TELLS,  /* the logger's function that says whether a level is enabled */
    ACQUIRE,
    RELEASE,
    PAGE,
    MEET,  /* called before an exchange of ranks that run ahead; None if none do */
    LEVEL, /* called after it */
    SHARED
};

enum { OPERANDS, RESULTS, GIVEN_WORDS, OPTIONS, STREAM, NUMBERS, ARGUMENTS };

enum { PLACES = 256 };   /* places of new results for which steps are kept */
enum { MOST_RANKS = 64 }; /* messages of more ranks need allocated memory */

static const char *const texts[] = {"closed", "failure", "made", "version", "call", "finished", "thread", "boards",
                                    "operation", "rounds", "barriers", "_uses", "holds", "late", "late_barrier",
                                    "interrupt", "again", "dtype", "_operation", "freed", "broken", "_stream",
                                    "array"};
enum { s_closed, s_failure, s_made, s_version, s_call, s_finished, s_thread, s_boards, s_operation, s_rounds,
       s_barriers, s_uses, s_holds, s_late, s_late_barrier, s_interrupt, s_again, s_dtype, s_operation_now, s_freed,
       s_broken, s_last_stream, s_array, NAMES };
static PyObject *names[NAMES], *no_payload, *information;
static PyTypeObject *ndarray; /* NumPy's array type; NULL if its layout is unknown */
static Libraries libraries;   /* the others whose arrays can be read here */
static const Rounds *rounds;
static const Record *record;

#define ITEM(tuple, index) PyTuple_GET_ITEM(tuple, index)

/* -- recognised ------------------------------------------------------------------------------------------ */

/* Whether two words are the same object, or equal and of the same immutable type; or tuples of such words. */
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

/* A hash of a look or of words: equal ones have the same. */
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

/* Whether the package's logger tells of plans. */
static int tells(PyObject *shared) {
    PyObject *told = ITEM(shared, TOLD);
    if (PyDict_CheckExact(told) && PyDict_GetItemWithError(told, information) == Py_False)
        return 0;
    return truth(PyObject_CallOneArg(ITEM(shared, TELLS), information)) != 0;
}

static int as_it_was(PyObject *shared, PyObject *call) {
    return is(ITEM(shared, CONTEXT), s_closed, Py_None) && is(ITEM(shared, BOARD), s_failure, Py_None) &&
           is(ITEM(shared, PLANS), s_made, ITEM(call, MADE)) &&
           (ITEM(call, MEMORY) == Py_None ||
            equal(ITEM(ITEM(call, MEMORY), 0), s_version, ITEM(ITEM(call, MEMORY), 1)) == 1) &&
           blocks_hold(shared, ITEM(call, KNOWN)) &&
           !tells(shared);
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
        PyObject *rounds_so_far = PyObject_GetAttr(board, names[s_rounds]);
        entered = boards != NULL && thread != NULL && rounds_so_far != NULL && PyList_CheckExact(boards) &&
                  PyObject_SetAttr(call, names[s_thread], thread) == 0 &&
                  (PyList_GET_SIZE(boards) > 0 || PyObject_SetAttr(call, names[s_rounds], rounds_so_far) == 0) &&
                  PyList_Append(boards, board) == 0 &&
                  PyObject_SetAttr(board, names[s_call], call) == 0;
        Py_XDECREF(boards);
        Py_XDECREF(thread);
        Py_XDECREF(rounds_so_far);
    }
    Py_DECREF(call);
    return entered;
}

/* -- performed ------------------------------------------------------------------------------------------- */

/* A call under way. */
typedef struct {
    PyObject *shared, *call, *results; /* the tuples above; the results that were given */
    PyObject *record;                  /* the record of the user's call, if `again` made it */
    int is_noted;                      /* whether the board knows of the call */
    PyObject *made, *place, *steps;    /* the new result, its address, and the steps that write it, */
    PyObject *home;                    /* or those that write to the call's home; borrowed */
    PyObject *payload, *met;           /* objects that own the payload, and all ranks' messages */
    Mail *mail, room[MOST_RANKS];      /* all ranks' messages */
    Py_ssize_t size;
} Turn;

/* Note the user's call with the board, which has to be done before Python runs after a word is published. A
 * public function does so at once; a call that `again` makes does so only when needed. No Python runs here. */
static int note(Turn *turn) {
    if (turn->is_noted)
        return 0;
    PyObject *shared = turn->shared, *board = ITEM(shared, BOARD), *none = PyTuple_New(0);
    PyObject *boards = PyList_New(1), *thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident());
    if (boards != NULL)
        PyList_SET_ITEM(boards, 0, Py_NewRef(board));
    if (none != NULL && boards != NULL && thread != NULL)
        turn->record = PyBaseObject_Type.tp_new((PyTypeObject *)ITEM(shared, RECORD), none, NULL);
    turn->is_noted = turn->record != NULL && PyObject_SetAttr(turn->record, names[s_boards], boards) == 0 &&
                     PyObject_SetAttr(turn->record, names[s_thread], thread) == 0 &&
                     PyObject_SetAttr(board, names[s_call], turn->record) == 0 &&
                     PyObject_SetAttr(ITEM(shared, THREAD), names[s_call], turn->record) == 0;
    Py_XDECREF(none);
    Py_XDECREF(boards);
    Py_XDECREF(thread);
    return turn->is_noted ? 0 : -1;
}

/* End a call that `again` makes as base/collective_call.py does: all ranks have to hear of an error. */
static PyObject *end(Turn *turn, PyObject *given) {
    PyObject *kind = NULL, *value = NULL, *trace = NULL;
    PyErr_Fetch(&kind, &value, &trace);
    if (kind != NULL && note(turn) < 0)
        PyErr_Clear();
    if (turn->record != NULL) {
        PyObject *boards = PyObject_GetAttr(turn->record, names[s_boards]), *done = NULL;
        PyObject *none = PyList_New(0);
        PyObject_SetAttr(ITEM(turn->shared, THREAD), names[s_call], Py_None);
        PyErr_NormalizeException(&kind, &value, &trace);
        if (kind != NULL && boards != NULL)
            done = PyObject_CallMethodObjArgs(turn->record, names[s_interrupt], value, boards, NULL);
        else if (none != NULL && PyObject_SetAttr(turn->record, names[s_boards], none) == 0 &&
                 PyObject_SetAttr(turn->record, names[s_finished], Py_True) == 0)
            done = Py_NewRef(Py_None);
        Py_XDECREF(boards);
        Py_XDECREF(none);
        Py_XDECREF(done);
        if (done == NULL)
            Py_CLEAR(given);
    }
    if (kind != NULL) {
        PyErr_Clear();
        PyErr_Restore(kind, value, trace);
    }
    return given;
}

/* A count of the board plus one; 0 with an error set. */
static uint64_t next_number(PyObject *board, int name) {
    PyObject *found = PyObject_GetAttr(board, names[name]);
    uint64_t number = found == NULL ? 0 : PyLong_AsUnsignedLongLong(found) + 1;
    Py_XDECREF(found);
    return PyErr_Occurred() ? 0 : number;
}

static int set_number(PyObject *board, int name, uint64_t number) {
    PyObject *value = PyLong_FromUnsignedLongLong(number);
    int failed = value == NULL ? -1 : PyObject_SetAttr(board, names[name], value);
    Py_XDECREF(value);
    return failed;
}

/* Call a function, unless it is None. */
static int hook(PyObject *function) {
    PyObject *done = function == Py_None ? Py_NewRef(Py_None) : PyObject_CallNoArgs(function);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* This rank's payload. The object that owns it is noted. */
static int pack(Turn *turn, Mail *own) {
    PyObject *payload = ITEM(turn->call, PAYLOAD);
    if (PyMemoryView_Check(payload)) {
        const Py_buffer *memory = PyMemoryView_GET_BUFFER(payload);
        own->payload = memory->buf;
        own->payload_bytes = memory->len;
        return 0;
    }
    turn->payload = payload == Py_None ? Py_NewRef(no_payload) : PyObject_CallNoArgs(payload);
    if (turn->payload != NULL && !PyBytes_Check(turn->payload)) {
        PyErr_SetString(PyExc_TypeError, "a payload is bytes");
        return -1;
    }
    if (turn->payload == NULL)
        return -1;
    own->payload = PyBytes_AS_STRING(turn->payload);
    own->payload_bytes = PyBytes_GET_SIZE(turn->payload);
    return 0;
}

/* The payload as bytes, a borrowed reference. */
static PyObject *payload_of(Turn *turn) {
    if (turn->payload == NULL)
        turn->payload = PyBytes_FromObject(ITEM(turn->call, PAYLOAD));
    return turn->payload;
}

static int is_all_bytes(PyObject *objects, Py_ssize_t size) {
    int are = PyTuple_CheckExact(objects) && PyTuple_GET_SIZE(objects) == size;
    for (Py_ssize_t i = 0; are && i < size; i++)
        are = PyBytes_Check(ITEM(objects, i));
    return are;
}

/* All ranks' messages when a peer is late: board.py waits for them. */
static int await(Turn *turn) {
    PyObject *call = turn->call, *payload = note(turn) < 0 ? NULL : payload_of(turn);
    if (payload != NULL)
        turn->met = PyObject_CallMethodObjArgs(ITEM(turn->shared, BOARD), names[s_late], ITEM(call, TEXT), payload,
                                               ITEM(call, TEXTS), NULL);
    if (turn->met == NULL)
        return -1;
    if (!PyTuple_CheckExact(turn->met) || PyTuple_GET_SIZE(turn->met) != 2 ||
        !is_all_bytes(ITEM(turn->met, 0), turn->size) || !is_all_bytes(ITEM(turn->met, 1), turn->size)) {
        PyErr_SetString(PyExc_TypeError, "an exchange gives texts and payloads");
        return -1;
    }
    for (Py_ssize_t rank = 0; rank < turn->size; rank++) {
        PyObject *text = ITEM(ITEM(turn->met, 0), rank), *sent = ITEM(ITEM(turn->met, 1), rank);
        turn->mail[rank] = (Mail){PyBytes_AS_STRING(text), PyBytes_AS_STRING(sent), PyBytes_GET_SIZE(text),
                                  PyBytes_GET_SIZE(sent)};
    }
    return 0;
}

/* Send this rank's message, and find all ranks' messages. */
static int exchange(Turn *turn) {
    PyObject *shared = turn->shared, *board = ITEM(shared, BOARD), *text = ITEM(turn->call, TEXT);
    Mail own = {.text = PyBytes_AS_STRING(text), .text_bytes = PyBytes_GET_SIZE(text)};
    uint64_t number = next_number(board, s_rounds);
    if (number == 0 || pack(turn, &own) < 0 || hook(ITEM(shared, MEET)) < 0)
        return -1;
    int done = rounds->exchange(ITEM(shared, PAGE), number, &own, turn->mail);
    if (done < 0)
        PyErr_SetString(PyExc_ValueError, "a text that no mailbox holds");
    if (done == 0)
        return await(turn);
    return done < 0 || set_number(board, s_rounds, number) < 0 ? -1 : hook(ITEM(shared, LEVEL));
}

/* Whether all ranks have sent the same texts as the last time. */
static int is_repeated(const Turn *turn) {
    PyObject *texts = ITEM(turn->call, TEXTS);
    for (Py_ssize_t rank = 0; rank < turn->size; rank++) {
        PyObject *text = ITEM(texts, rank);
        if (PyBytes_GET_SIZE(text) != turn->mail[rank].text_bytes ||
            memcmp(PyBytes_AS_STRING(text), turn->mail[rank].text, (size_t)turn->mail[rank].text_bytes) != 0)
            return 0;
    }
    return 1;
}

/* All ranks' texts, or payloads, a new reference. */
static PyObject *all_of(const Turn *turn, int payloads) {
    PyObject *all = PyTuple_New(turn->size);
    for (Py_ssize_t rank = 0; all != NULL && rank < turn->size; rank++) {
        const Mail *mail = turn->mail + rank;
        PyObject *one = payloads ? PyBytes_FromStringAndSize(mail->payload, mail->payload_bytes)
                                 : PyBytes_FromStringAndSize(mail->text, mail->text_bytes);
        if (one == NULL)
            Py_CLEAR(all);
        else
            PyTuple_SET_ITEM(all, rank, one);
    }
    return all;
}

static int meet(Turn *turn) {
    PyObject *board = ITEM(turn->shared, BOARD);
    uint64_t number = next_number(board, s_barriers);
    if (number == 0)
        return -1;
    if (!rounds->arrive(ITEM(turn->shared, PAGE), number)) {
        PyObject *value = note(turn) < 0 ? NULL : PyLong_FromUnsignedLongLong(2 * number);
        int came = value == NULL ? -1 : truth(PyObject_CallMethodOneArg(board, names[s_late_barrier], value));
        Py_XDECREF(value);
        if (came != 1)
            return -1;
    }
    return set_number(board, s_barriers, number);
}

/* Whether a step runs no Python: it copies boxes, or is a `CompiledStep`. */
static int is_plain(PyObject *step) {
    const char *kind = Py_TYPE(step)->tp_name;
    return strcmp(kind, "shardmath.redistribution._box.Boxes") == 0 || strcmp(kind, "CompiledStep") == 0;
}

static int run(Turn *turn, PyObject *steps) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++) {
        PyObject *step = ITEM(steps, i);
        if (step == Py_None) {
            if (meet(turn) < 0)
                return -1;
            continue;
        }
        if (!turn->is_noted && !is_plain(step) && note(turn) < 0)
            return -1;
        PyObject *done = PyObject_CallNoArgs(step);
        if (done == NULL)
            return -1;
        Py_DECREF(done);
    }
    return 0;
}

/* The new result of a call, and its address if that is known: new references. */
static PyObject *new_result(PyObject *call, PyObject **place) {
    PyObject *made = PyObject_CallNoArgs(ITEM(call, NEW));
    if (made == NULL || !PyTuple_CheckExact(made) || PyTuple_GET_SIZE(made) != 2)
        return made;
    PyObject *result = Py_NewRef(ITEM(made, 0));
    *place = Py_NewRef(ITEM(made, 1));
    Py_DECREF(made);
    return result;
}

/* The steps bound to a result, a tuple; None if the driver has to make the call. A new reference. */
static PyObject *bound(PyObject *call, PyObject *result) {
    PyObject *steps = PyObject_CallOneArg(ITEM(call, BIND), result);
    if (steps != NULL && steps != Py_None && !PyTuple_CheckExact(steps)) {
        PyErr_SetString(PyExc_TypeError, "the steps of a call are a tuple, or None");
        Py_CLEAR(steps);
    }
    return steps;
}

/* The steps that write to the call's home, from which the result is copied. A new reference. */
static PyObject *steps_home(Turn *turn) {
    turn->home = ITEM(turn->call, HOME);
    return Py_NewRef(ITEM(turn->home, HOME_STEPS));
}

/* Count one more result at a place: 1 while it is copied there, 0 if steps are to be bound to the place, or -1. `so_far`
 * is NULL the first time. In a program that keeps its results no place comes often. */
static int is_copied_to(PyObject *home, PyObject *by_place, PyObject *place, PyObject *so_far) {
    long times = so_far == NULL ? 0 : PyLong_AsLong(so_far);
    if (times >= PyLong_AsLong(ITEM(home, HOME_OFTEN)))
        return PyErr_Occurred() ? -1 : 0;
    PyObject *count = PyLong_FromLong(times + 1);
    int failed = count == NULL ? -1 : PyDict_SetItem(by_place, place, count);
    Py_XDECREF(count);
    return failed < 0 ? -1 : 1;
}

/* The steps that write this result, a new reference: those of the last result at the same place, if there was one; or
 * those that write to the call's home, if the result may be copied from there; else as `bound`. */
static PyObject *steps_into(Turn *turn) {
    PyObject *shared = turn->shared, *call = turn->call, *made = turn->made, *place = turn->place;
    PyObject *by_place = ITEM(call, STEPS), *looks = NULL;
    int copies = made != NULL && ITEM(call, HOME) != Py_None;
    if (made == NULL)
        place = Py_None;
    else if (place == NULL) {
        PyObject *one = PyTuple_Pack(1, made), *none = PyTuple_New(0);
        looks = one == NULL || none == NULL ? NULL : look(shared, one, none);
        Py_XDECREF(one);
        Py_XDECREF(none);
        if (PyErr_Occurred())
            return NULL;
        if (looks == NULL) /* its place is not known */
            return copies ? steps_home(turn) : bound(call, made);
        place = ITEM(looks, 0);
    }
    if (PyDict_GET_SIZE(by_place) >= PLACES)
        PyDict_Clear(by_place);
    PyObject *steps = PyDict_GetItemWithError(by_place, place);
    if (steps != NULL && !PyLong_CheckExact(steps))
        Py_INCREF(steps);
    else if (!PyErr_Occurred()) {
        copies = copies ? is_copied_to(ITEM(call, HOME), by_place, place, steps) : 0;
        steps = copies < 0 ? NULL : copies ? steps_home(turn) : bound(call, made == NULL ? Py_None : made);
        if (!copies && steps != NULL && steps != Py_None && PyDict_SetItem(by_place, place, steps) < 0)
            Py_CLEAR(steps);
    }
    Py_XDECREF(looks);
    return steps;
}

/* Note that this plan was used last: see LRUCache. */
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
static int put(const Turn *turn, PyObject *buffer) {
    const Py_buffer *room = PyMemoryView_GET_BUFFER(buffer);
    Py_ssize_t begin = 0;
    for (Py_ssize_t rank = 0; rank < turn->size; rank++)
        begin += turn->mail[rank].payload_bytes;
    if (begin != room->len) {
        PyErr_SetString(PyExc_ValueError, "payloads of other lengths than agreed on");
        return -1;
    }
    char *to = room->buf;
    for (Py_ssize_t rank = 0; rank < turn->size; to += turn->mail[rank++].payload_bytes)
        memcpy(to, turn->mail[rank].payload, (size_t)turn->mail[rank].payload_bytes);
    return 0;
}

/* The address of a result in C order of so many bytes; NULL with an error set. */
static char *memory_of(PyObject *result, Py_ssize_t nbytes) {
    char *target = NULL;
    if (Py_TYPE(result) == ndarray)
        return ((NDArray *)result)->data;
    const Attributes *attributes = attributes_of(&libraries, Py_TYPE(result));
    if (attributes != NULL) {
        PyObject *place = at(&attributes->address, result);
        target = place == NULL ? NULL : PyLong_AsVoidPtr(place);
        Py_XDECREF(place);
        return target;
    }
    Py_buffer room;
    if (PyObject_GetBuffer(result, &room, PyBUF_WRITABLE) < 0)
        return NULL;
    target = room.len == nbytes ? room.buf : NULL;
    PyBuffer_Release(&room);
    if (target == NULL)
        PyErr_SetString(PyExc_ValueError, "a result of another length than agreed on");
    return target;
}

/* How memory is copied on a GPU: addresses of the driver's functions, the CUDA context that they need, the stream, and a
 * function for all other cases. */
enum { COPY_FUNCTION, COPY_CURRENT, COPY_CONTEXT, COPY_STREAM, COPY_OTHERWISE, COPY_FIELDS };

/* Copy memory where the call is made: `how` is None on cores; a tuple as above, or a function(target, source, nbytes),
 * on GPUs. */
static int copy_by(PyObject *how, uint64_t target, uint64_t source, uint64_t nbytes) {
    if (how == Py_None) {
        memmove((void *)(uintptr_t)target, (const void *)(uintptr_t)source, (size_t)nbytes);
        return 0;
    }
    if (PyTuple_CheckExact(how) && PyTuple_GET_SIZE(how) == COPY_FIELDS) {
        int (*copy)(uint64_t, uint64_t, size_t, void *) = NULL, (*current)(void **) = NULL;
        void *function = PyLong_AsVoidPtr(ITEM(how, COPY_FUNCTION)), *asks = PyLong_AsVoidPtr(ITEM(how, COPY_CURRENT));
        void *wanted = PyLong_AsVoidPtr(ITEM(how, COPY_CONTEXT)), *context = NULL;
        void *stream = PyLong_AsVoidPtr(ITEM(how, COPY_STREAM));
        if (PyErr_Occurred())
            return -1;
        memcpy(&copy, &function, sizeof copy);
        memcpy(&current, &asks, sizeof current);
        if (current(&context) == 0 && context == wanted && copy(target, source, (size_t)nbytes, stream) == 0)
            return 0;
        how = ITEM(how, COPY_OTHERWISE);
    }
    PyObject *done = PyObject_CallFunction(how, "KKK", (unsigned long long)target, (unsigned long long)source,
                                           (unsigned long long)nbytes);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

/* Copy a result, whose memory is in C order, from its home. */
static int fetch(Turn *turn) {
    PyObject *home = turn->home, *how = ITEM(home, HOME_COPIER);
    Py_ssize_t nbytes = PyLong_AsSsize_t(ITEM(home, HOME_BYTES));
    char *target = memory_of(turn->made, nbytes), *source = PyLong_AsVoidPtr(ITEM(home, HOME_ADDRESS));
    if (target == NULL || PyErr_Occurred() || (how != Py_None && note(turn) < 0))
        return -1;
    return copy_by(how, (uint64_t)(uintptr_t)target, (uint64_t)(uintptr_t)source, (uint64_t)nbytes);
}

/* Add up all ranks' payloads in the result. `how` is (address of a function of sum.c, bytes of the result,
 * where they begin in each payload); the result's memory is in C order. */
static int sum_into(const Turn *turn, PyObject *how, PyObject *result) {
    void (*sum)(int, const char *const *, int, char *const *, int64_t) = NULL;
    void *address = PyLong_AsVoidPtr(ITEM(how, 0));
    Py_ssize_t nbytes = PyLong_AsSsize_t(ITEM(how, 1)), begin = PyLong_AsSsize_t(ITEM(how, 2));
    if (PyErr_Occurred())
        return -1;
    memcpy(&sum, &address, sizeof sum);
    char *target = memory_of(result, nbytes);
    const char *some[MOST_RANKS], **sources = turn->size <= MOST_RANKS ? some : PyMem_New(const char *, turn->size);
    if (target == NULL || sources == NULL)
        return -1;
    int fit = 1;
    for (Py_ssize_t rank = 0; rank < turn->size; rank++) {
        sources[rank] = turn->mail[rank].payload + begin;
        fit = fit && turn->mail[rank].payload_bytes >= begin + nbytes;
    }
    if (fit)
        sum((int)turn->size, sources, 1, &target, nbytes);
    else
        PyErr_SetString(PyExc_ValueError, "payloads of other lengths than agreed on");
    if (sources != some)
        PyMem_Free(sources);
    return fit ? 0 : -1;
}

/* The results that the call returns, a new reference. */
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

/* Make the new result, and the steps that write it; 0 if the driver has to make the call. */
static int prepare(Turn *turn) {
    PyObject *board = ITEM(turn->shared, BOARD), *call = turn->call;
    int under_way = equal(board, s_operation_now, ITEM(call, OPERATION));
    if (under_way < 0 ||
        (under_way == 0 && PyObject_SetAttr(board, names[s_operation], ITEM(call, OPERATION)) < 0))
        return -1;
    turn->size = rounds->size(ITEM(turn->shared, PAGE));
    turn->mail = turn->size <= MOST_RANKS ? turn->room : PyMem_New(Mail, turn->size);
    if (turn->mail == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    if (run(turn, ITEM(call, BEFORE)) < 0)
        return -1;
    if ((ITEM(call, NEW) != Py_None && (turn->made = new_result(call, &turn->place)) == NULL) ||
        (ITEM(call, BIND) != Py_None &&
         (turn->steps = steps_into(turn)) == NULL)) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear(); /* the driver meets the same error, and tells the other ranks */
        return 0;
    }
    return turn->steps != Py_None;
}

/* Go on after the exchange if all ranks have sent the same as the last time. */
static PyObject *complete(Turn *turn) {
    PyObject *call = turn->call, *receive = ITEM(call, RECEIVE);
    if (use(turn->shared, ITEM(call, ENTRY)) < 0)
        return NULL;
    if (PyTuple_CheckExact(receive)) {
        if (sum_into(turn, receive, turn->made == NULL ? ITEM(turn->results, 0) : turn->made) < 0)
            return NULL;
    } else if (receive != Py_None && put(turn, receive) < 0)
        return NULL;
    if (turn->steps != NULL && run(turn, turn->steps) < 0)
        return NULL;
    if (turn->home != NULL && fetch(turn) < 0)
        return NULL;
    return result_of(call, turn->results, turn->made);
}

/* Go on after the exchange if another text has come: the driver does the rest. */
static PyObject *differs(Turn *turn, PyObject *arguments, PyObject *otherwise) {
    PyObject *texts = all_of(turn, 0), *payloads = all_of(turn, 1), *payload = payload_of(turn), *given = NULL;
    if (texts != NULL && payloads != NULL && payload != NULL) {
        PyObject *all[] = {NULL, ITEM(turn->call, BEGUN), arguments, turn->made == NULL ? Py_None : turn->made,
                           payload, texts, payloads};
        given = PyObject_Vectorcall(otherwise, all + 1, 6 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    Py_XDECREF(texts);
    Py_XDECREF(payloads);
    return given;
}

static void drop(Turn *turn) {
    Py_XDECREF(turn->place);
    Py_XDECREF(turn->made);
    Py_XDECREF(turn->payload);
    Py_XDECREF(turn->met);
    Py_XDECREF(turn->steps);
    if (turn->mail != turn->room)
        PyMem_Free(turn->mail);
}

/* Make the call, when this thread has the board. `whole(turn, of)` makes its arguments, a new reference. */
static PyObject *perform(Turn *turn, PyObject *(*whole)(const Turn *, const void *), const void *of,
                         PyObject *otherwise, int *left) {
    PyObject *given = NULL, *arguments = NULL;
    int ready = prepare(turn);
    *left = ready == 0;
    if (ready > 0 && exchange(turn) == 0) {
        if (is_repeated(turn))
            given = complete(turn);
        else if (note(turn) == 0 && (arguments = whole(turn, of)) != NULL)
            given = differs(turn, arguments, otherwise);
    }
    Py_XDECREF(arguments);
    given = end(turn, given);
    drop(turn);
    return given;
}

/* Take the board, unless another thread has it. */
static int take(PyObject *shared) {
    return truth(PyObject_CallOneArg(ITEM(shared, ACQUIRE), Py_False)) == 1;
}

static PyObject *release(PyObject *shared, PyObject *given) {
    PyObject *kind, *value, *trace;
    PyErr_Fetch(&kind, &value, &trace);
    PyObject *released = PyObject_CallNoArgs(ITEM(shared, RELEASE));
    if (released == NULL)
        Py_CLEAR(given);
    Py_XDECREF(released);
    if (kind != NULL) {
        PyErr_Clear();
        PyErr_Restore(kind, value, trace);
    }
    return given;
}

static PyObject *none_unless(PyObject *given, int is_made) {
    if (given != NULL || is_made || PyErr_Occurred())
        return given;
    Py_RETURN_NONE;
}

static PyObject *themselves(const Turn *turn, const void *of) {
    (void)turn;
    return Py_NewRef((PyObject *)of);
}

/* direct(shared, kept, arguments, otherwise): the results of the call; None if the driver has to make it.
 * After an exchange in which a rank has sent another text, `otherwise` gives the results. */
static PyObject *direct(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    (void)module;
    if (count != 4 || !PyTuple_CheckExact(given[0]) || PyTuple_GET_SIZE(given[0]) != SHARED ||
        !PyDict_CheckExact(given[1])) {
        PyErr_SetString(PyExc_TypeError, "direct(what calls share, calls, arguments, otherwise)");
        return NULL;
    }
    PyObject *shared = given[0], *call = recognised(shared, given[1], given[2]), *found = NULL;
    int left = 0, entered = 0;
    if (call != NULL && as_it_was(shared, call) && take(shared)) {
        entered = enter(shared);
        if (entered) {
            Turn turn = {.shared = shared, .call = call, .results = ITEM(given[2], RESULTS), .is_noted = 1};
            found = perform(&turn, themselves, given[2], given[3], &left);
        }
        found = release(shared, found);
    }
    Py_XDECREF(call);
    return none_unless(found, entered && !left);
}

/* -- as the user made it ---------------------------------------------------------------------------------- */

enum { MOST_WORDS = 128, MOST_ARRAYS = 16, MOST_OBJECTS = 32, MOST_AXES = 32, DEEPEST = 4 };

/* What the words of an array say of its memory: where it lies, and its strides; the strides alone; or, for an array
 * that `Attributes` describe, only that it is contiguous. */
enum { PLACED, STRIDED, CONTIGUOUS };

/* The arguments of a call as words, which are its key: for an array how it lies, for a number or a text its value, for
 * a tuple or list what it holds, and for anything else which object it is. `place` is where the arrays lie.
 * References are borrowed. */
typedef struct {
    int64_t words[MOST_WORDS], place[MOST_ARRAYS];
    int count, arrays, objects, lying;
    PyObject *array[MOST_ARRAYS], *object[MOST_OBJECTS];
} Look;

enum { OBJECT, ARRAY, INTEGER, REAL, LETTERS, TUPLE, LIST, NAMED, OF_LIBRARY, KINDS = 16 };

static int add(Look *look, int kind, Py_ssize_t length, const void *words, Py_ssize_t nbytes) {
    Py_ssize_t count = 1 + (nbytes + 7) / 8;
    if (look->count + count > MOST_WORDS)
        return 0;
    look->words[look->count + count - 1] = 0; /* a text may leave a part of the last word free */
    look->words[look->count] = (int64_t)length * KINDS + kind;
    if (nbytes > 0)
        memcpy(look->words + look->count + 1, words, (size_t)nbytes);
    look->count += (int)count;
    return 1;
}

static int add_object(Look *look, PyObject *x) {
    if (look->objects == MOST_OBJECTS)
        return 0;
    look->object[look->objects++] = x;
    return add(look, OBJECT, 0, &x, sizeof x);
}

static int add_array(Look *look, NDArray *x) {
    if (look->arrays == MOST_ARRAYS || x->axes > MOST_AXES)
        return 0;
    int64_t place = (int64_t)(intptr_t)x->data, words[2 + 2 * MOST_AXES] = {look->lying == STRIDED ? 0 : place, x->flags};
    for (int i = 0; i < x->axes; i++) {
        words[2 + 2 * i] = x->shape[i];
        words[3 + 2 * i] = x->strides[i];
        if (x->shape[i] < 1)
            return 0; /* it has no address */
    }
    look->place[look->arrays] = place;
    look->array[look->arrays++] = (PyObject *)x;
    return add(look, ARRAY, x->axes, words, (Py_ssize_t)sizeof *words * (2 + 2 * x->axes)) &&
           add_object(look, x->dtype);
}

/* Read the numbers of a tuple; returns how many there are, or -1. */
static int numbers_of(PyObject *tuple, int64_t *numbers) {
    if (tuple == NULL || !PyTuple_Check(tuple) || PyTuple_GET_SIZE(tuple) > MOST_AXES)
        return -1;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++)
        numbers[i] = PyLong_AsLongLong(ITEM(tuple, i));
    return PyErr_Occurred() ? -1 : (int)PyTuple_GET_SIZE(tuple);
}

/* An array of a library, without facts that only Python understands. */
static int add_by_attributes(Look *look, const Attributes *attributes, PyObject *x) {
    if (look->arrays == MOST_ARRAYS || is_special(attributes, x) != 0)
        return 0;
    int64_t words[3 + 2 * MOST_AXES], place = number_at(&attributes->address, x);
    PyObject *shape = place > 0 ? at(&attributes->shape, x) : NULL;
    if (shape == NULL)
        return 0; /* it has no address, or is in another kind of memory */
    int axes = numbers_of(shape, words + 3), count = axes, is_full = has_elements(shape);
    Py_DECREF(shape);
    PyObject *dtype = axes < 0 || !is_full ? NULL : at(&attributes->dtype, x);
    Py_XDECREF(dtype); /* it lives as long as the array */
    if (dtype == NULL)
        return 0;
    words[0] = look->lying == PLACED ? place : 0;
    words[1] = device_of(attributes, x);
    words[2] = (int64_t)(intptr_t)attributes->type;
    if (PyErr_Occurred())
        return 0;
    if (look->lying == CONTIGUOUS) {
        if (truth_at(&attributes->contiguous, x) != 1)
            return 0;
    } else {
        PyObject *strides = at(&attributes->strides, x);
        int same = numbers_of(strides, words + 3 + axes) == axes;
        Py_XDECREF(strides);
        if (!same)
            return 0;
        count += axes;
    }
    look->place[look->arrays] = place;
    look->array[look->arrays++] = x;
    return add(look, OF_LIBRARY, axes, words, (Py_ssize_t)sizeof *words * (3 + count)) && add_object(look, dtype);
}

/* Add an argument to the words; false if it cannot be recognised by words. */
static int add_value(Look *look, PyObject *x, int depth) {
    if (Py_TYPE(x) == ndarray)
        return add_array(look, (NDArray *)x);
    const Attributes *attributes = attributes_of(&libraries, Py_TYPE(x));
    if (attributes != NULL)
        return add_by_attributes(look, attributes, x);
    if (PyUnicode_CheckExact(x) && PyUnicode_IS_COMPACT_ASCII(x))
        return add(look, LETTERS, PyUnicode_GET_LENGTH(x), PyUnicode_DATA(x), PyUnicode_GET_LENGTH(x));
    if (PyFloat_CheckExact(x)) {
        double value = PyFloat_AS_DOUBLE(x);
        return add(look, REAL, 0, &value, sizeof value);
    }
    if (PyLong_CheckExact(x)) {
        int is_long = 0;
        long long value = PyLong_AsLongLongAndOverflow(x, &is_long);
        return !is_long && add(look, INTEGER, 0, &value, sizeof value);
    }
    int is_list = PyList_CheckExact(x);
    if (!is_list && !PyTuple_CheckExact(x))
        return add_object(look, x);
    Py_ssize_t length = is_list ? PyList_GET_SIZE(x) : PyTuple_GET_SIZE(x);
    int same = depth < DEEPEST && add(look, is_list ? LIST : TUPLE, length, NULL, 0);
    for (Py_ssize_t i = 0; same && i < length; i++)
        same = add_value(look, is_list ? PyList_GET_ITEM(x, i) : ITEM(x, i), depth + 1);
    return same;
}

static int add_call(Look *look, PyObject *function, PyObject *arguments, PyObject *named) {
    PyObject *name, *value;
    Py_ssize_t place = 0;
    look->count = look->arrays = look->objects = 0;
    int same = PyTuple_CheckExact(arguments) && PyDict_CheckExact(named) && add_object(look, function) &&
               add_value(look, arguments, 0);
    while (same && PyDict_Next(named, &place, &name, &value))
        same = add(look, NAMED, 0, NULL, 0) && add_value(look, name, 0) && add_value(look, value, 0);
    return same;
}

static PyObject *words_of(const Look *look, int begin, int end) {
    return PyBytes_FromStringAndSize((const char *)(look->words + begin), (end - begin) * (Py_ssize_t)sizeof *look->words);
}

static PyObject *tuple_of(PyObject *const *objects, int count) {
    PyObject *all = PyTuple_New(count);
    for (int i = 0; all != NULL && i < count; i++)
        PyTuple_SET_ITEM(all, i, Py_NewRef(objects[i]));
    return all;
}

/* After a look that failed: 0 if the call is just not recognised, -1 with an error that has to be raised. */
static int in_vain(void) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return -1;
    PyErr_Clear();
    return 0;
}

/* look(function, arguments, named, held, lying): (key, words of what is held, arrays, objects); None for a call
 * that cannot be recognised. While the objects live, equal words mean equal values. */
static PyObject *look_at(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    Look look = {.lying = count == 5 ? (int)PyLong_AsLong(given[4]) : PLACED};
    (void)module;
    int begin = 0, seen = count == 5 && !PyErr_Occurred() && add_call(&look, given[0], given[1], given[2]);
    if (seen) {
        begin = look.count;
        seen = add_value(&look, given[3], 0);
    }
    if (!seen) {
        if (in_vain() < 0)
            return NULL;
        Py_RETURN_NONE;
    }
    return Py_BuildValue("(NNNN)", words_of(&look, 0, begin), words_of(&look, begin, look.count),
                         tuple_of(look.array, look.arrays), tuple_of(look.object, look.objects));
}

/* What is kept of a call as the user made it. */
enum {
    ITS_WATCHES, /* functions that say whether torch has to record or trace the call */
    ITS_SHARED,
    ITS_OTHERWISE,
    ITS_TURN,  /* a function: the half of the double buffer whose turn it is */
    ITS_CALLS, /* the call for each half, None if it is not known */
    ITS_HELD,  /* operands of the object whose method it is */
    ITS_FACTS, /* their words */
    ITS_OPERANDS,
    ITS_RESULTS, /* numbers of its arrays, None for those left out */
    ITS_GIVEN,   /* the number of the result that is returned, None if there is only one */
    ITS_WORDS,   /* words, options and numbers */
    ITS_OBJECTS,
    ITS_COPY     /* how operands, wherever they lie, are copied to stand-ins, see below; None for a call with its own */
};

/* What is kept of a call in which ranks do not meet, wherever its arrays lie: see collectives/repeats.py. */
enum {
    LAUNCH_WATCHES,
    LAUNCH_SHARED,
    LAUNCH_GO,      /* launches it, given operand, result and stream; returns None if it has done nothing */
    LAUNCH_NEW,     /* makes a new result like the operand; None if the result is given */
    LAUNCH_OPERAND, /* numbers of operand and result among the arrays */
    LAUNCH_RESULT,
    LAUNCH_STREAM,  /* gives the current stream of a device */
    LAUNCH_DEVICE,  /* the number of that device */
    LAUNCH_ORDER,   /* knows the stream of the last such call */
    LAUNCH_TEAM,
    LAUNCH_OPERATION,
    LAUNCH_REQUIRE, /* raises the error that the CUDA driver has returned */
    LAUNCH_OBJECTS
};

static PyObject *those(const Look *look, PyObject *numbers) {
    PyObject *all = PyTuple_New(PyTuple_GET_SIZE(numbers));
    for (Py_ssize_t i = 0; all != NULL && i < PyTuple_GET_SIZE(numbers); i++) {
        PyObject *number = ITEM(numbers, i);
        PyTuple_SET_ITEM(all, i, Py_NewRef(number == Py_None ? number : look->array[PyLong_AsLong(number)]));
    }
    return all;
}

typedef struct {
    const Look *look;
    PyObject *kept;
} Made;

static PyObject *its_arguments(const Turn *turn, const void *of) {
    const Made *made = of;
    PyObject *words = ITEM(made->kept, ITS_WORDS);
    return Py_BuildValue("(NOOOOO)", those(made->look, ITEM(made->kept, ITS_OPERANDS)), turn->results,
                         ITEM(words, 0), ITEM(words, 1), Py_None, ITEM(words, 2));
}

/* The current context's calls, a new reference; NULL if there is none. */
static PyObject *calls_of_current(PyObject *stack, PyObject *standard) {
    PyObject *entered = NULL, *calls = NULL;
    if (PyContextVar_Get(stack, NULL, &entered) < 0)
        return NULL;
    PyObject *context = entered != NULL && PyTuple_GET_SIZE(entered) > 0
                            ? ITEM(entered, PyTuple_GET_SIZE(entered) - 1)
                            : PyList_GET_ITEM(standard, 0);
    if (context != Py_None)
        calls = PyObject_GetAttr(context, names[s_again]);
    Py_XDECREF(entered);
    return calls;
}

/* Whether no call is under way in this thread, or on this board. */
static int is_idle(PyObject *shared) {
    if (!is(ITEM(shared, THREAD), s_call, Py_None))
        return 0;
    PyObject *last = PyObject_GetAttr(ITEM(shared, BOARD), names[s_call]);
    int idle = last != NULL && (last == Py_None || is(last, s_finished, Py_True));
    Py_XDECREF(last);
    return idle;
}

/* The call that is kept for the half whose turn it is, a new reference. */
static PyObject *its_call(PyObject *kept) {
    PyObject *calls = ITEM(kept, ITS_CALLS), *call = PyList_GET_ITEM(calls, 0);
    if (call != Py_None && call == PyList_GET_ITEM(calls, 1))
        return Py_NewRef(call); /* it uses neither half */
    PyObject *half = PyObject_CallNoArgs(ITEM(kept, ITS_TURN));
    call = half == NULL ? NULL : PyList_GetItem(calls, PyLong_AsSsize_t(half));
    Py_XDECREF(half);
    return call == Py_None ? NULL : Py_XNewRef(call);
}

/* Whether the operands of the object whose method it is look as before; if so, they are added to the look. */
static int holds_the_same(PyObject *kept, Look *look) {
    int begin = look->count;
    PyObject *facts = ITEM(kept, ITS_FACTS);
    return add_value(look, ITEM(kept, ITS_HELD), 0) &&
           (Py_ssize_t)sizeof *look->words * (look->count - begin) == PyBytes_GET_SIZE(facts) &&
           memcmp(look->words + begin, PyBytes_AS_STRING(facts), (size_t)PyBytes_GET_SIZE(facts)) == 0;
}

/* The result of the driver's call that the user's call returns. */
static PyObject *the_given(PyObject *kept, PyObject *results) {
    if (results == NULL || ITEM(kept, ITS_GIVEN) == Py_None)
        return results;
    PyObject *one = PyTuple_GetItem(results, PyLong_AsSsize_t(ITEM(kept, ITS_GIVEN)));
    Py_XINCREF(one);
    Py_DECREF(results);
    return one;
}

/* How operands of calls that look alike are copied to stand-ins: see stand_ins.py. */
enum {
    COPIED_TO,     /* for each operand (weak reference to its stand-in, the address, bytes), or None */
    COPIED_FROM,   /* how often operands were copied, by their places */
    COPIED_FIRST,  /* so many of these places are left to the driver, */
    COPIED_OFTEN,  /* and those from which operands were copied so often */
    COPIED_PLACES, /* at most so many are counted */
    COPIED_BY      /* see `copy_by` */
};

/* Count a copy of operands at these places: 1, 0 if the driver has to make the call, or -1. */
static int count_copy(PyObject *copy, PyObject *places) {
    PyObject *copied = ITEM(copy, COPIED_FROM), *times = PyDict_GetItemWithError(copied, places);
    long so_far = times == NULL ? 0 : PyLong_AsLong(times);
    if (PyErr_Occurred() || so_far >= PyLong_AsLong(ITEM(copy, COPIED_OFTEN)) ||
        (times == NULL && PyDict_GET_SIZE(copied) < PyLong_AsSsize_t(ITEM(copy, COPIED_FIRST))))
        return PyErr_Occurred() ? -1 : 0;
    if (times == NULL && PyDict_GET_SIZE(copied) >= PyLong_AsSsize_t(ITEM(copy, COPIED_PLACES)))
        PyDict_Clear(copied);
    PyObject *count = PyLong_FromLong(so_far + 1);
    int failed = count == NULL ? -1 : PyDict_SetItem(copied, places, count);
    Py_XDECREF(count);
    return failed < 0 ? -1 : 1;
}

/* Where the operands of a call lie, a tuple. */
static PyObject *places_of(const Look *look, PyObject *operands) {
    PyObject *places = PyTuple_New(PyTuple_GET_SIZE(operands));
    for (Py_ssize_t i = 0; places != NULL && i < PyTuple_GET_SIZE(operands); i++) {
        PyObject *number = ITEM(operands, i), *place = number == Py_None ? Py_NewRef(Py_None) : NULL;
        if (place == NULL && (place = PyLong_FromLongLong(look->place[PyLong_AsLong(number)])) == NULL)
            Py_CLEAR(places);
        else
            PyTuple_SET_ITEM(places, i, place);
    }
    return places;
}

/* The array of a stand-in, to which an operand has been copied: a new reference, or NULL. */
static PyObject *copied_to(PyObject *stand_in, PyObject *how, int64_t place) {
    PyObject *owner = PyObject_CallNoArgs(ITEM(stand_in, 0));
    PyObject *array = owner == NULL || owner == Py_None ? NULL : PyObject_GetAttr(owner, names[s_array]);
    Py_XDECREF(owner);
    unsigned long long target = PyLong_AsUnsignedLongLong(ITEM(stand_in, 1)), nbytes = PyLong_AsUnsignedLongLong(ITEM(stand_in, 2));
    if (array != NULL && (PyErr_Occurred() || copy_by(how, target, (uint64_t)place, nbytes) < 0))
        Py_CLEAR(array);
    return array;
}

/* The arrays of stand-ins, to which the operands have been copied, and whose places they take in the look; None for a
 * call with its own operands. NULL if the driver has to make the call, which meets the same error if there is one, or
 * with an error that is no one's fault. */
static PyObject *stand_ins(PyObject *kept, Look *look) {
    PyObject *copy = ITEM(kept, ITS_COPY), *operands = ITEM(kept, ITS_OPERANDS);
    if (copy == Py_None)
        return Py_NewRef(Py_None);
    PyObject *arrays = NULL, *places = NULL;
    if (truth(PyObject_GetAttr(ITEM(ITEM(kept, ITS_SHARED), HEAP), names[s_freed])) == 0)
        places = places_of(look, operands);
    if (places != NULL && count_copy(copy, places) == 1)
        arrays = PyTuple_New(PyTuple_GET_SIZE(operands));
    for (Py_ssize_t i = 0; arrays != NULL && i < PyTuple_GET_SIZE(operands); i++) {
        PyObject *number = ITEM(operands, i), *array = number == Py_None ? Py_NewRef(Py_None) : NULL;
        if (array == NULL)
            array = copied_to(ITEM(ITEM(copy, COPIED_TO), i), ITEM(copy, COPIED_BY), look->place[PyLong_AsLong(number)]);
        if (array == NULL)
            Py_CLEAR(arrays);
        else
            PyTuple_SET_ITEM(arrays, i, array);
    }
    Py_XDECREF(places);
    for (Py_ssize_t i = 0; arrays != NULL && i < PyTuple_GET_SIZE(operands); i++)
        if (ITEM(operands, i) != Py_None)
            look->array[PyLong_AsLong(ITEM(operands, i))] = ITEM(arrays, i);
    if (arrays == NULL)
        (void)in_vain();
    return arrays;
}

/* Whether none of these functions returns true. */
static int are_silent(PyObject *watches) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(watches); i++)
        if (truth(PyObject_CallNoArgs(ITEM(watches, i))) != 0)
            return 0;
    return 1;
}

/* The result of a launch, while this thread has the board. NULL if nothing was done, or with an error set of which
 * the peers have been told. No Python runs between the word that lists the call and its launch: see launch.c. */
static PyObject *put_on(PyObject *kept, const Look *look, PyObject *stream) {
    PyObject *shared = ITEM(kept, LAUNCH_SHARED), *operation = ITEM(kept, LAUNCH_OPERATION);
    PyObject *x = look->array[PyLong_AsLong(ITEM(kept, LAUNCH_OPERAND))], *out = NULL, *answer = NULL;
    int under_way = equal(ITEM(shared, BOARD), s_operation_now, operation);
    if (under_way == 1 || (under_way == 0 && PyObject_SetAttr(ITEM(shared, BOARD), names[s_operation], operation) == 0))
        out = ITEM(kept, LAUNCH_NEW) == Py_None ? Py_NewRef(look->array[PyLong_AsLong(ITEM(kept, LAUNCH_RESULT))])
                                                : PyObject_CallOneArg(ITEM(kept, LAUNCH_NEW), x);
    if (out != NULL) {
        PyObject *all[] = {NULL, x, out, stream};
        answer = PyObject_Vectorcall(ITEM(kept, LAUNCH_GO), all + 1, 3 | PY_VECTORCALL_ARGUMENTS_OFFSET, NULL);
    }
    int status = answer == NULL || answer == Py_None ? -1 : (int)PyLong_AsLong(answer);
    if (status != 0)
        Py_CLEAR(out);
    if (status > 0) /* the CUDA driver has refused a launch that is listed */
        Py_XDECREF(PyObject_CallFunction(ITEM(kept, LAUNCH_REQUIRE), "sO", "cuLaunchKernel", answer));
    Py_XDECREF(answer);
    if (out == NULL && (status > 0 || in_vain() < 0)) {
        Turn turn = {.shared = shared};
        end(&turn, NULL);
    }
    return out;
}

/* The result of a call that is listed and launched, a new reference; else as `put_on`. */
static PyObject *launched(PyObject *kept, const Look *look, PyObject *function) {
    PyObject *shared = ITEM(kept, LAUNCH_SHARED), *found = NULL;
    if (!is_idle(shared) || !is(ITEM(shared, CONTEXT), s_closed, Py_None) ||
        !is(ITEM(shared, BOARD), s_failure, Py_None) || tells(shared) ||
        truth(PyObject_GetAttr(ITEM(kept, LAUNCH_TEAM), names[s_broken])) != 0 ||
        truth(PyObject_GetAttr(ITEM(shared, HEAP), names[s_freed])) != 0) {
        (void)in_vain();
        return NULL;
    }
    PyObject *stream = PyObject_CallOneArg(ITEM(kept, LAUNCH_STREAM), ITEM(kept, LAUNCH_DEVICE));
    if (stream == NULL) {
        (void)in_vain();
        return NULL;
    }
    /* A launch on a default stream follows earlier launches there, and is not captured. */
    long number = PyLong_AsLong(stream);
    if ((number == 0 || number == 1) && equal(ITEM(kept, LAUNCH_ORDER), s_last_stream, stream) == 1 &&
        record->begin(function, look->array, look->arrays) == 0) {
        record->on_stream((uint64_t)number);
        if (take(shared))
            found = release(shared, put_on(kept, look, stream));
        if (found != NULL)
            record->end(RETURNED);
        else if (PyErr_Occurred())
            record->end(RAISED);
        else
            record->withdraw();
    }
    Py_DECREF(stream);
    return found;
}

/* What is kept of a call whose arrays lie so, a new reference. */
static PyObject *found_by(Look *look, int lying, PyObject *calls, PyObject *const *given) {
    PyObject *key = NULL, *kept = NULL;
    look->lying = lying;
    if (add_call(look, given[0], given[1], given[2]) && (key = words_of(look, 0, look->count)) != NULL)
        kept = Py_XNewRef(PyDict_GetItemWithError(calls, key));
    Py_XDECREF(key);
    return kept;
}

/* again(stack, standard, function, arguments, named): what the function would return; None if nothing was done,
 * and it has to be called. The current context is the last of `stack`, or else in `standard`. */
static PyObject *again(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    Look look;
    (void)module;
    if (count != 5 || !PyList_CheckExact(given[1])) {
        PyErr_SetString(PyExc_TypeError, "again(stack, standard, function, arguments, named)");
        return NULL;
    }
    PyObject *calls = calls_of_current(given[0], given[1]), *kept = NULL, *call = NULL, *found = NULL;
    int left = 0, entered = 0;
    if (calls != NULL && PyDict_CheckExact(calls) && PyDict_GET_SIZE(calls) > 0) {
        int anywhere = PyDict_Contains(calls, given[2]) == 1;
        kept = found_by(&look, anywhere ? CONTIGUOUS : PLACED, calls, given + 2);
        if (kept == NULL && !anywhere && !PyErr_Occurred())
            kept = found_by(&look, STRIDED, calls, given + 2);
    }
    int is_known = kept != NULL && are_silent(ITEM(kept, 0)), is_launch = is_known && look.lying == CONTIGUOUS;
    if (is_launch)
        found = launched(kept, &look, given[2]);
    else if (is_known && holds_the_same(kept, &look) && is_idle(ITEM(kept, ITS_SHARED)))
        call = its_call(kept);
    if (call == NULL && !is_launch)
        (void)in_vain();
    if (call != NULL && as_it_was(ITEM(kept, ITS_SHARED), call) && take(ITEM(kept, ITS_SHARED))) {
        PyObject *results = those(&look, ITEM(kept, ITS_RESULTS));
        PyObject *copies = results == NULL ? NULL : stand_ins(kept, &look);
        entered = copies != NULL;
        if (entered) {
            Turn turn = {.shared = ITEM(kept, ITS_SHARED), .call = call, .results = results};
            Made made = {&look, kept};
            if (record->begin(given[2], look.array, look.arrays) == 0)
                found = perform(&turn, its_arguments, &made, ITEM(kept, ITS_OTHERWISE), &left);
            if (left)
                record->withdraw();
            else
                record->end(found == NULL ? RAISED : RETURNED);
        }
        Py_XDECREF(copies);
        Py_XDECREF(results);
        found = the_given(kept, release(ITEM(kept, ITS_SHARED), found));
    }
    Py_XDECREF(calls);
    Py_XDECREF(kept);
    Py_XDECREF(call);
    return none_unless(found, entered && !left);
}

/* know_library(attributes): note how to read the arrays of one more library. */
static PyObject *know_one_library(PyObject *module, PyObject *given) {
    (void)module;
    if (know_library(&libraries, given) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* know(ndarray, array): note the type of NumPy's arrays, if NDArray describes how this one is laid out. */
static PyObject *know(PyObject *module, PyObject *const *given, Py_ssize_t count) {
    (void)module;
    if (count != 2 || !PyType_Check(given[0]) || Py_TYPE(given[1]) != (PyTypeObject *)given[0] ||
        ((PyTypeObject *)given[0])->tp_basicsize < (Py_ssize_t)sizeof(NDArray)) {
        PyErr_SetString(PyExc_TypeError, "know(ndarray, an array)");
        return NULL;
    }
    Py_buffer memory;
    if (PyObject_GetBuffer(given[1], &memory, PyBUF_STRIDES) < 0)
        return NULL;
    const NDArray *x = (NDArray *)given[1];
    int same = x->data == memory.buf && x->axes == memory.ndim;
    for (int i = 0; same && i < memory.ndim; i++)
        same = x->shape[i] == memory.shape[i] && x->strides[i] == memory.strides[i];
    PyBuffer_Release(&memory);
    if (same && is(given[1], s_dtype, x->dtype))
        ndarray = (PyTypeObject *)Py_NewRef(given[0]);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"direct", (PyCFunction)(void (*)(void))direct, METH_FASTCALL,
     "Make a call that was made before; None where it is another, and nothing was done."},
    {"again", (PyCFunction)(void (*)(void))again, METH_FASTCALL, "Make what the user calls, as it was made before."},
    {"look", (PyCFunction)(void (*)(void))look_at, METH_FASTCALL, "What a call is recognised by as the user makes it."},
    {"know", (PyCFunction)(void (*)(void))know, METH_FASTCALL, "Tell which type is NumPy's arrays."},
    {"know_library", know_one_library, METH_O, "Tell how to read the arrays of a library."},
    {"key", (PyCFunction)(void (*)(void))key, METH_FASTCALL, "Where a call is kept."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_direct", "Calls that come again, compiled.", 0, methods, NULL, NULL, NULL, NULL,
};

/* The pointer in a capsule of another module, which keeps it. */
static const void *given_by(const char *module, const char *attribute, const char *name) {
    PyObject *giver = PyImport_ImportModule(module);
    PyObject *capsule = giver == NULL ? NULL : PyObject_GetAttrString(giver, attribute);
    const void *given = capsule == NULL ? NULL : PyCapsule_GetPointer(capsule, name);
    Py_XDECREF(capsule);
    Py_XDECREF(giver);
    if (given == NULL)
        PyErr_Format(PyExc_ImportError, "%s was not built, or of other sources", name);
    return given;
}

PyMODINIT_FUNC PyInit__direct(void) {
    for (int i = 0; i < NAMES; i++)
        if ((names[i] = PyUnicode_InternFromString(texts[i])) == NULL)
            return NULL;
    no_payload = PyBytes_FromStringAndSize(NULL, 0);
    information = PyLong_FromLong(20); /* logging.INFO */
    PyObject *module = no_payload == NULL || information == NULL ? NULL : PyModule_Create(&definition);
    rounds = given_by("shardmath.symmetric._board", "ROUNDS", ROUNDS);
    record = rounds == NULL ? NULL : given_by("shardmath.base._record", "RECORDING", RECORDING);
    if (record == NULL)
        Py_CLEAR(module);
    if (module != NULL && PyModule_AddIntConstant(module, "INTERFACE", 12) < 0) /* as compiled.py has it */
        Py_CLEAR(module);
    return module;
}
