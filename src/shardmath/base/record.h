/* How compiled code of other layers records an operation that it makes: the module `_record` has a `Record` in a
 * capsule of that name. No line of Python runs in these, but what the garbage collector does.
 */
#ifndef SHARDMATH_RECORD_H
#define SHARDMATH_RECORD_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define RECORDING "shardmath.base._record.RECORDING"

enum { RETURNED, RAISED };

typedef struct {
    /* The operation of a function begins in this thread, on these arrays of NumPy's. */
    void (*begin)(PyObject *function, PyObject *const *arrays, int count);
    /* It has ended so. */
    void (*end)(int state);
    /* It has not begun after all. */
    void (*withdraw)(void);
} Record;

#endif
