"""Parts of a GPU: streams whose kernels run on some of its multiprocessors, and on no others.

A kernel that starts while a long one runs waits for blocks of that to end, however urgent it is.
What runs on another part waits for none:

    multiprocessors   0 ........ 15   16 ............................ 131
                      first part      the rest

A part is a green context of the driver, from CUDA 12.4 on, and belongs to the device's primary
context: memory, kernels and events are the same.
"""

from __future__ import annotations

import weakref
from functools import cache
from typing import Any, NamedTuple

from shardmath.cuda.device import Device
from shardmath.cuda.driver import beside_captures, bindings, call
from shardmath.cuda.stream import destroy_stream
from shardmath.errors import CudaError

_OWN_DEFAULT_STREAM, _NON_BLOCKING = 1, 1  # flags of a green context, and of a stream


class Part(NamedTuple):
    """Some multiprocessors of a device, `processors` of them: a green context."""

    device: Device
    processors: int
    context: Any

    def stream(self, owner: object) -> Any:
        """A stream whose kernels run here. It goes when it is done and `owner` gone."""
        self.device.activate()
        greatest = call("cuCtxGetStreamPriorityRange")[1]
        stream = call("cuGreenCtxStreamCreate", self.context, _NON_BLOCKING, greatest)
        weakref.finalize(owner, destroy_stream, stream).atexit = False
        return stream


@cache
def split(device: Device, processors: int) -> tuple[Part, Part] | None:
    """A part of a device of at least so many multiprocessors, and one of all others; None where its
    driver has no parts. They stay as long as the process.
    """
    device.activate()
    kind = bindings().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
    try:
        with beside_captures():
            whole = call("cuDeviceGetDevResource", device.handle, kind)
            groups, _, rest = call("cuDevSmResourceSplitByCount", 1, whole, 0, processors)
            first, second = (_part(device, resource) for resource in (groups[0], rest))
    except (AttributeError, CudaError):
        return None
    return first, second


def _part(device: Device, resource: Any) -> Part:
    described = call("cuDevResourceGenerateDesc", [resource], 1)
    context = call("cuGreenCtxCreate", described, device.handle, _OWN_DEFAULT_STREAM)
    return Part(device, int(resource.sm.smCount), context)
