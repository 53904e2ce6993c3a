"""An array library of the tests: memory at an address, with a shape and strides."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import Attributes, Library
from shardmath.arrays.spec import ArraySpec, packed_strides

__all__ = ["Tray", "Trays"]


@dataclass(frozen=True)
class Tray:
    """`strides` are in elements; `keep` is what owns the memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    device: str
    keep: Any

    @property
    def ordinal(self):
        return int(self.device.removeprefix("cuda:")) if self.on_gpu else -1

    @property
    def on_gpu(self):
        return self.device != "cpu"

    def is_packed(self):
        return self.strides == packed_strides(self.shape, 1, "C")

    @property
    def elements(self):
        """A NumPy array on memory of the host."""
        dtype = dtypes.to_numpy(self.dtype)
        steps = tuple(stride * dtype.itemsize for stride in self.strides)
        interface = {"version": 3, "shape": self.shape, "strides": steps, "typestr": dtype.str}
        interface["data"] = (self.address, False)
        return np.asarray(type("Memory", (), {"__array_interface__": interface})())


class Trays(Library):
    """Found where its folder is among those of `shardmath.arrays.libraries`."""

    name = "tray"
    spaces = ("cpu", "cuda")
    home = "cpu"  # where the heap's memory lies, as this process pretends

    def owns_type(self, kind):
        return kind is Tray

    def spec(self, x):
        itemsize = dtypes.of(x.dtype).itemsize
        return ArraySpec(self.name, x.dtype, x.shape, x.strides, x.device, itemsize)

    def attributes(self):
        paths = {"address": "address", "strides": "strides", "device": "ordinal"}
        paths |= {"on_gpu": "on_gpu", "contiguous": "is_packed()", "special": ()}
        return Attributes(Tray, **paths, stream=self.stream)

    def pointer(self, x):
        return x.address

    def anchor(self, x):
        return x.address

    def host_view(self, x, *, writable=False, name="out"):
        if x.device != "cpu":
            raise ValueError(f"{name} is on {x.device}")
        return x.elements

    def from_host(self, host):
        spec = dtypes.of(host.dtype)
        strides = tuple(stride // spec.itemsize for stride in host.strides)
        return Tray(host.ctypes.data, host.shape, strides, spec.name, "cpu", host)

    def from_bytes(self, raw, dtype, shape, strides):
        name = dtypes.of(dtype).name
        return Tray(raw.ctypes.data, tuple(shape), tuple(strides), name, self.home, raw)

    def on_device(self, owner, dtype, shape, strides, *, start=0):
        address = owner.__cuda_array_interface__["data"][0] + start
        name = dtypes.of(dtype).name
        return Tray(address, tuple(shape), tuple(strides), name, owner.device, owner)

    def maker(self, shape, dtype, order, device="cpu"):
        return partial(self._made, shape, dtype, order, device)

    def _made(self, shape, dtype, order, device):
        strides, nbytes = packed_strides(shape, 1, order), dtypes.of(dtype).itemsize
        nbytes *= math.prod(shape)
        if device in ("cpu", self.home):
            raw = np.empty(nbytes, np.uint8)
            address = raw.ctypes.data
        else:
            import torch

            raw = torch.empty(nbytes, dtype=torch.uint8, device=device)
            address = raw.data_ptr()
        return Tray(address, tuple(shape), strides, dtypes.of(dtype).name, device, raw)
