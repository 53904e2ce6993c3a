/* Rounds and barriers for compiled code of other layers, without Python objects for words or messages. The module
 * `_board` has a `Rounds` in a capsule of the name ROUNDS.
 */
#ifndef SHARDMATH_BOARD_H
#define SHARDMATH_BOARD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define ROUNDS "shardmath.symmetric._board.ROUNDS"

/* One rank's message: a text, and a payload that repeated calls do not compare with the last one's. */
typedef struct {
    const char *text, *payload;
    Py_ssize_t text_bytes, payload_bytes;
} Mail;

typedef struct {
    /* The number of ranks; -1 where `page` is no page. */
    Py_ssize_t (*size)(PyObject *page);
    /* Publish round `number`. 1 where all ranks' messages were found, which stay until this rank publishes the
     * round after the next; 0 where board.py has to go on; -1 for a message too long for a mailbox. */
    int (*exchange)(PyObject *page, uint64_t number, const Mail *own, Mail *all);
    /* Publish barrier `number`, and whether all peers were seen to arrive. */
    int (*arrive)(PyObject *page, uint64_t number);
} Rounds;

#endif
