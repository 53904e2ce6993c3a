/* What compiled code of other layers asks of a page of board.c: a round or a barrier, without an object of
 * Python's for a word or a message. The module `_board` has a `Rounds` in a capsule of that name.
 */
#ifndef SHARDMATH_BOARD_H
#define SHARDMATH_BOARD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define ROUNDS "shardmath.symmetric._board.ROUNDS"

/* One rank's message: a text, and a payload that calls do not compare with the last one's. */
typedef struct {
    const char *text, *payload;
    Py_ssize_t text_bytes, payload_bytes;
} Mail;

typedef struct {
    /* How many ranks there are; -1 for what is no page. */
    Py_ssize_t (*size)(PyObject *page);
    /* Publish round `number`. 1 where all ranks' messages were found, which stay until this rank publishes the
     * round after the next; 0 where board.py has to see to the rest; -1 for a message that no mailbox holds. */
    int (*exchange)(PyObject *page, uint64_t number, const Mail *own, Mail *all);
    /* Publish barrier `number`, and whether all peers were seen to arrive. */
    int (*arrive)(PyObject *page, uint64_t number);
} Rounds;

#endif
