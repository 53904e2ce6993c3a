/* Functions by which compiled code of other layers records its operations: the module `_record` has a `Record` in a
 * capsule of the name RECORDING. They run no Python code, apart from the garbage collector and from asking tensors for
 * their shapes.
 */
#ifndef SHARDMATH_RECORD_H
#define SHARDMATH_RECORD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define RECORDING "shardmath.base._record.RECORDING/2" /* the number rises when Record changes */

enum { RETURNED, RAISED };

typedef struct {
    /* An operation of `function` on these arrays begins in this thread. -1 with an exception that was raised when
     * one was asked for its shape. */
    int (*begin)(PyObject *function, PyObject *const *arrays, int count);
    /* The operation works on that stream. */
    void (*on_stream)(uint64_t address);
    /* The operation has ended: RETURNED or RAISED. */
    void (*end)(int state);
    /* Remove the operation, as if it had not begun. */
    void (*withdraw)(void);
} Record;

#endif
