/* How compiled code of other layers records an operation that it makes: the module `_record` has a `Record` in a
 * capsule of that name. No line of Python runs in these, but what the garbage collector does, and where the shape of a
 * tensor is asked.
 */
#ifndef SHARDMATH_RECORD_H
#define SHARDMATH_RECORD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define RECORDING "shardmath.base._record.RECORDING/2" /* the number rises when Record changes */

enum { RETURNED, RAISED };

typedef struct {
    /* The operation of a function begins in this thread, on these arrays. -1 with an error, where the shape of one
     * was asked of Python. */
    int (*begin)(PyObject *function, PyObject *const *arrays, int count);
    /* It works on that stream. */
    void (*on_stream)(uint64_t address);
    /* It has ended so. */
    void (*end)(int state);
    /* It has not begun after all. */
    void (*withdraw)(void);
} Record;

#endif
