"""Calls that come again, compiled: with a driver that writes down what is launched, and no GPU.

Arrays lie in memory of the host, CuPy's too.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

import shardmath.cuda
from built import module_from_c
from ranks import Pool
from shardmath.arrays import library_named

DRIVER = """
#include <string.h>
void *context = (void *)7, *stream, *function;
unsigned blocks, threads;
char argument[104];
int launches, answer;
int cuCtxGetCurrent(void **found) { *found = context; return 0; }
int cuLaunchKernel(void *f, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned shared, void *s, void **parameters, void **extra) {
    if (y != 1 || z != 1 || b != 1 || c != 1 || shared || extra) return 1;
    function = f, stream = s, blocks = x, threads = a, launches += 1;
    memcpy(argument, parameters[0], sizeof argument);
    return answer;
}
"""
WINDOW, TAG, COUNT = 4, 99, 8
TOLD = 5, 6  # with each call
FUNCTION, CONTEXT, BLOCKS, THREADS, STREAM = 11, 7, 3, 64, 5
FEW = 12  # the kernel for few bytes


class Calls:
    """A compiled call on a library's arrays of COUNT float32, and the words that it looks at."""

    def __init__(self, folder, library, counts=(0,) * 7):
        folder = Path(folder)
        self.library = library_named(library)
        importlib.import_module(library)
        compiler = shutil.which("cc")
        if compiler is None:
            pytest.skip("no C compiler here")
        source, made = folder / "driver.c", folder / "driver.so"
        source.write_text(DRIVER)
        command = [compiler, "-shared", "-fPIC"]
        subprocess.run([*command, str(source), "-o", str(made)], check=True)
        self.driver = ctypes.CDLL(str(made))
        pretended = f'-DDRIVER="{made}"'  # the real one may be loaded
        module = module_from_c(shardmath.cuda, "launch.c", "_launch", folder, pretended)
        # A report, a peer's calls, this rank's, their tags, and the words with them.
        self.words = np.zeros(3 + WINDOW + 16 * WINDOW, np.uint64)
        at = self.words.ctypes.data
        nbytes = 4 if counts[0] else 4 * COUNT
        self.x, self.out = self.array(), self.array()
        kernel = (FUNCTION, CONTEXT, BLOCKS, THREADS, bytes(range(104)), 8)
        told = struct.pack("2Q", *TOLD)
        listed = (at + 16, at + 24, at + 24 + 8 * WINDOW, WINDOW, TAG, told, (at + 8,))
        arrays = (self.x, nbytes), (self.out, nbytes)
        fixed = self.library.attributes(), *arrays, True, 15, kernel, at
        self.repeat = module.Repeat(*fixed, listed, counts, None)
        # One that depends on what the peer lists, in a row like this rank's.
        self.peer = self.words[2:].copy()
        peers = (self.peer.ctypes.data,)
        self.asking = module.Repeat(*fixed, (*listed[:-1], peers), (0,) * 7, told)
        self.listed = module.LISTED
        # One that nobody lists: the second array's address at 8, and from 16 on; the first's at 40.
        places = (1, 8, 0), (1, 16, 4), (0, 40, 0)
        alike = self.x, self.out
        self.launch = module.Launch(self.library.attributes(), alike, places, kernel[:-1])

    def array(self, count=COUNT, shift=0, dtype="float32"):
        whole = np.zeros(count + 16, dtype)
        start = -whole.ctypes.data % 16 // whole.itemsize + shift
        part = whole[start : start + count]
        if self.library.name == "torch":
            return self.library.from_host(part)
        return self.library.viewer(dtype, part.shape, (1,), "cuda:0")(part, part.ctypes.data)

    def integer(self, name):
        return ctypes.c_int.in_dll(self.driver, name).value

    def go(self, x=None, out=None, *counts):
        x, out = self.x if x is None else x, self.out if out is None else out
        return self.repeat.go(x, out, STREAM, *counts)

    def set(self, name, kind, value):
        kind.in_dll(self.driver, name).value = value


def check_launched(_, folder, library):
    calls = Calls(folder, library)
    found = [calls.go(), calls.go(out=calls.x)]
    argument = bytes((ctypes.c_char * 104).in_dll(calls.driver, "argument"))
    x = calls.library.pointer(calls.x)
    wanted = bytes(range(8)) + struct.pack("QQ", x, x) + bytes(range(24, 104))
    names = ("launches", "blocks", "threads")
    words = [int(word) for word in calls.words[: 3 + WINDOW]]
    told = calls.words[3 + WINDOW :].reshape(WINDOW, 16)[:, :3].tolist()
    return found, argument == wanted, [calls.integer(name) for name in names], words, told


def check_unlisted(_, folder, library):
    calls = Calls(folder, library)
    x, out = calls.x, calls.out
    calls.words[0] = 1  # its caller looks at reports
    found = [calls.launch.go(STREAM, x, out)]
    argument = bytes((ctypes.c_char * 104).in_dll(calls.driver, "argument"))
    pointer = calls.library.pointer
    y, first, rest = pointer(out), bytes(range(8)), bytes(range(48, 104))
    wanted = first + struct.pack("QQ", y, y + 4) + bytes(range(24, 40))
    kernel = [calls.integer(name) for name in ("launches", "blocks", "threads")]
    stream = ctypes.c_void_p.in_dll(calls.driver, "stream").value
    others = (calls.array(COUNT + 1), calls.array(dtype="int32"), x[:0], [1.0])
    left = [calls.launch.go(STREAM, x, other) for other in others]
    left += [calls.launch.go(STREAM, other, out) for other in others]
    calls.set("context", ctypes.c_void_p, 8)
    left.append(calls.launch.go(STREAM, x, out))
    calls.set("context", ctypes.c_void_p, CONTEXT)
    after = calls.integer("launches")
    calls.set("answer", ctypes.c_int, 1)
    found.append(calls.launch.go(STREAM, x, out))
    same = argument == wanted + struct.pack("Q", pointer(x)) + rest
    return found, same, kernel, stream, left, after, int(calls.words[2])


def check_counted(_, folder, library):
    """Two ranks, of which this one is the second: for more than 8 bytes to a peer, 9 blocks; where
    no part has more than 4, a kernel of its own.
    """
    calls = Calls(folder, library, (2, 1, 8, 9, 4, FEW, 32))
    found = []
    cases = [
        (COUNT, COUNT, (2, 6), None),
        (5, 8, (2, 3), (5, 3)),
        (6, 3, (1, 5), None),
        (2, 5, (2, 0), (5, 0)),
        (2, 2, (1, 1), None),
        (2, 2, (1, 1), (1, 1)),
        (2, 3, (1, 1), None),
    ]
    for rows, takes, sent, expected in cases:
        status = calls.go(calls.array(rows), calls.array(takes), sent, expected)
        argument = bytes((ctypes.c_char * 104).in_dll(calls.driver, "argument"))
        told = calls.words[3 + WINDOW :].reshape(WINDOW, 16)[int(calls.words[2]) % WINDOW, :2]
        words = struct.unpack("8Q", argument[32:96])
        kernel = ctypes.c_void_p.in_dll(calls.driver, "function").value, calls.integer("blocks")
        found.append((status, kernel, told.tolist(), words, argument[96:]))
        calls.words[1] = calls.words[2]  # the peer follows
    launches = calls.integer("launches")
    two = [calls.go(None, None, *each) for each in [((4, 5), None), ((8,), None), ([8, 0], None)]]
    two += [calls.go(None, None, (-1, 9), None), calls.go(None, None, (4, 4), (4, 5))]
    two += [calls.go(calls.array(COUNT).reshape(2, 4), None, (1, 1), None)]
    return found, two, calls.integer("launches") - launches


def check_asked(_, folder, library):
    """What is answered, and launched, where a peer lists this call or another, or is late."""
    calls, found = Calls(folder, library), {}
    peer = calls.peer
    tags, told = peer[1 : 1 + WINDOW], peer[1 + WINDOW :].reshape(WINDOW, 16)
    cases = (
        ("the same", TAG, TOLD, 0),
        ("the same, and more", TAG, TOLD, 2),
        ("another call", TAG + 1, TOLD, 0),
        ("other words", TAG, (TOLD[0], TOLD[1] + 1), 0),
        ("late", TAG, TOLD, -1),
    )
    for number, (name, tag, words, ahead) in enumerate(cases, 1):
        place = number % WINDOW
        tags[place], told[place, :2], peer[0] = tag, words, number + ahead
        before = calls.integer("launches")
        status = calls.asking.go(calls.x, calls.out, STREAM)
        launched = calls.integer("launches") - before
        found[name] = status == calls.listed, launched, int(calls.words[2])
    return found


@pytest.fixture(params=["torch", "cupy"])
def library(request):
    pytest.importorskip(request.param)
    return request.param


def test_a_call_is_launched_if_the_peers_list_what_they_did(tmp_path, library):
    with Pool(1) as ranks:
        (found,) = ranks.run(check_asked, str(tmp_path), library)
    assert found == {
        "the same": (False, 1, 1),
        "the same, and more": (False, 1, 2),
        "another call": (True, 0, 3),
        "other words": (True, 0, 4),
        "late": (True, 0, 5),
    }


def test_a_launch_that_nobody_lists(tmp_path, library):
    """It has the addresses of its arrays; where one looks otherwise, nothing is launched."""
    with Pool(1) as ranks:
        ((found, same, kernel, stream, left, after, listed),) = ranks.run(
            check_unlisted, str(tmp_path), library
        )
    assert found == [0, 1] and same and stream == STREAM
    assert kernel == [1, BLOCKS, THREADS]
    assert left == [None] * 9 and (after, listed) == (1, 0)


def test_counts_go_into_the_argument(tmp_path, library):
    with Pool(1) as ranks:
        ((found, left, more),) = ranks.run(check_counted, str(tmp_path), library)
    unknown, rest, mail = (1 << 64) - 1, bytes(range(96, 104)), (FUNCTION, BLOCKS)
    assert found == [
        (0, mail, [2, 6], (0, 8, 2, 6, unknown, unknown, 8, unknown), rest),
        (0, (FUNCTION, 9), [2, 3], (0, 8, 2, 3, 5, 3, 8, unknown), rest),
        (0, mail, [1, 5], (0, 4, 1, 5, unknown, unknown, 3, unknown), rest),
        (0, (FUNCTION, 9), [2, 0], (0, 8, 2, 0, 5, 0, 5, unknown), rest),
        (0, (FEW, 1), [1, 1], (0, 4, 1, 1, unknown, unknown, 2, 1), rest),
        (0, (FEW, 1), [1, 1], (0, 4, 1, 1, 1, 1, 2, 1), rest),
        (0, (FEW, 1), [1, 1], (0, 4, 1, 1, unknown, unknown, 3, unknown), rest),
    ]
    assert left == [None] * len(left) and more == 0


def left_to_torch(calls):
    import torch

    lazy = torch._neg_view(calls.array())
    assert lazy.is_neg()
    return {
        "a subclass": calls.go(torch.nn.Parameter(calls.array(), requires_grad=False)),
        "a gradient": calls.go(calls.array().requires_grad_()),
        "a lazy negation": calls.go(lazy),
    }


def check_left(_, folder, library):
    """What is left to Python: nothing is launched, and nothing is listed."""
    calls = Calls(folder, library)
    x, both = calls.x, calls.array(2 * COUNT)
    found = {
        **(left_to_torch(calls) if library == "torch" else {}),
        "an array of another kind": calls.go(np.zeros(COUNT, np.float32)),
        "no array": calls.go([1.0]),
        "another type": calls.go(calls.array(dtype="int32")),
        "another shape": calls.go(calls.array(COUNT + 1)),
        "no elements": calls.go(x[:0]),
        "another result": calls.go(out=calls.array(COUNT + 1)),
        "strides": calls.go(both[::2]),
        "no alignment": calls.go(calls.array(shift=1)),
        "an overlap": calls.go(both[:COUNT], both[4 : 4 + COUNT]),
    }
    calls.words[0] = 1
    found["a report"] = calls.go()
    calls.words[:3] = 0, 3, 2 + WINDOW
    found["a peer that is far behind"] = calls.go()
    calls.words[:3] = 0
    calls.set("context", ctypes.c_void_p, 8)
    found["another context"] = calls.go()
    calls.set("context", ctypes.c_void_p, CONTEXT)
    left = calls.integer("launches"), int(calls.words[2])
    calls.set("answer", ctypes.c_int, 1)
    return found, left, calls.go(x)


def test_a_call_is_listed_and_launched(tmp_path, library):
    with Pool(1) as ranks:
        ((found, same, driver, words, told),) = ranks.run(check_launched, str(tmp_path), library)
    assert found == [0, 0] and same
    assert driver == [2, BLOCKS, THREADS]
    assert words == [0, 0, 2, 0, TAG, TAG, 0]
    assert told == [[0, 0, 0], [*TOLD, 0], [*TOLD, 0], [0, 0, 0]]


def test_what_is_not_as_it_was_is_left_to_python(tmp_path, library):
    with Pool(1) as ranks:
        ((found, left, failed),) = ranks.run(check_left, str(tmp_path), library)
    assert {name for name, status in found.items() if status is not None} == set()
    assert left == (0, 0) and failed == 1
