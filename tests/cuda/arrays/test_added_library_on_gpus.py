"""An array library that is one file of the tests, on GPUs."""

from __future__ import annotations

import numpy as np
from test_added_library import NUMBERS, halves, one_more

from shardmath.arrays import library_named, library_of
from shardmath.collectives import all_gather, all_reduce
from shardmath.distribution import Slab, redistribute
from shardmath.fft import fft
from shardmath.linalg.advanced import matmul


def tray_on(context, part):
    from shardmath.cuda.driver import call

    host = np.ascontiguousarray(part)
    tray = library_named("tray").empty(host.shape, host.dtype, "C", context.team.device.name)
    call("cuMemcpyHtoD", tray.address, host.ctypes.data, host.nbytes)
    return tray


def differs(context, tray, wanted):
    """How far a tray that lies on this rank's GPU is from what is wanted."""
    from shardmath.cuda.driver import call

    context.team.device.synchronize()
    assert (library_of(tray).name, tray.device) == ("tray", context.team.device.name)
    order = library_of(tray).spec(tray).order
    host = np.empty(tray.shape, tray.dtype, "F" if order == "F" else "C")
    call("cuMemcpyDtoH", host.ctypes.data, tray.address, host.nbytes)
    return float(np.abs(host - wanted).max())


def every_operator(context):
    with one_more(), context:
        (rows, columns), found = halves(NUMBERS, context.rank), []
        x = tray_on(context, rows)
        found.append(differs(context, redistribute(x, Slab.X, Slab.Y), columns))
        transform = halves(np.fft.fft2(NUMBERS), context.rank)[0]
        made = fft(tray_on(context, rows + 0j), distribution=Slab.X)
        found.append(differs(context, made, transform))
        y = tray_on(context, halves(NUMBERS.T, context.rank)[1])
        product = matmul(x, y, distributions=[Slab.X, Slab.Y, Slab.X])
        found.append(differs(context, product, halves(NUMBERS @ NUMBERS.T, context.rank)[0]))
        found.append(differs(context, all_reduce(tray_on(context, NUMBERS)), 2 * NUMBERS))
        found.append(differs(context, all_gather(x), NUMBERS))
        return found


def test_a_file_is_an_array_library(gpus):
    for found in gpus.run(every_operator, ranks=2):
        assert len(found) == 5 and max(found) < 1e-10, found
