"""PyTorch tensors, on the host and on GPUs. Only those of the host have a NumPy view.

torch is imported only inside verbs, and whoever calls them holds a tensor or the module: it has
been imported already.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, ClassVar

import numpy as np

from shardmath.arrays import dtypes
from shardmath.arrays.base import Attributes, HostArray, Library, Space
from shardmath.arrays.dtypes import DType
from shardmath.arrays.spec import ArraySpec, Packed, overlaps, packed_strides
from shardmath.base.compiled import extension
from shardmath.base.untraced import has_tangent

_DLPACK = "shardmath.arrays._dlpack"  # the module that dlpack.c makes
_INTEGERS, _BFLOAT = 0, 4  # DLPack's codes for kinds of elements
_CODES = {"i": _INTEGERS, "f": 2, "c": 5, "b": 6}
_WORTH = 1 << 20  # multiplications from which oneDNN's product is twice as fast


class Torch(Library):
    """`torch.Tensor` and its subclasses, except those that compute by `__torch_dispatch__`.

    Such a subclass (DTensor, FakeTensor, and so on) may lack the memory that it describes.
    """

    name: ClassVar[str] = "torch"
    spaces: ClassVar[tuple[Space, ...]] = ("cpu", "cuda")
    transforms: ClassVar[bool] = True

    def owns_type(self, kind: type) -> bool:
        for base in kind.__mro__:
            if base.__name__ == "Tensor" and base.__module__ == "torch":
                own: Any = getattr(kind, "__torch_dispatch__", None)
                return own is getattr(base, "__torch_dispatch__", None)
        return False

    def records(self, x: Any) -> bool:
        """Whether `x` requires grad, outside of `torch.no_grad`, or has a tangent."""
        if not x.requires_grad:
            return has_tangent(x)
        import torch

        return bool(torch.is_grad_enabled())

    def spec(self, x: Any) -> ArraySpec:
        try:
            spec = _spec(x.dtype, x.shape, x.stride(), x.layout, x.device)
        except RuntimeError:  # it has no strides
            _require_strided(x.layout, x.device)
            raise
        if _address(x) == 0 and spec.size:
            raise ValueError(
                "this torch tensor has no memory of its own, as under torch.func and torch.vmap: "
                "make the call outside of what is transformed"
            )
        return spec

    def pointer(self, x: Any) -> int:
        return int(x.data_ptr())

    def host_view(self, x: Any, *, writable: bool = False, name: str = "out") -> HostArray:
        import torch

        _require_strided(x.layout, x.device)
        if x.device.type != "cpu":
            raise ValueError(
                f"this torch tensor is on {x.device}, and the call needs host memory; pass x.cpu()"
            )
        if writable and self.is_lazy(x):
            raise ValueError(
                f"{name} is a lazy conjugate, and the call writes into it: pass an ordinary tensor"
            )
        if writable and overlaps(tuple(x.shape), x.stride()):
            raise ValueError(
                f"{name} is an expanded view, and the call writes into it: pass an ordinary tensor"
            )
        dtype = dtypes.of(x.dtype)
        tensor = x.detach().resolve_conj().resolve_neg()
        if not dtype.carrier:
            return np.asarray(tensor.numpy())
        host: HostArray = tensor.view(getattr(torch, dtype.carrier)).numpy()
        return host.view(dtypes.to_numpy(dtype))

    def is_lazy(self, x: Any) -> bool:
        return bool(x.is_conj() or x.is_neg())

    def identity(self, x: Any) -> tuple[ArraySpec, int] | None:
        if self.records(x) or x.is_conj() or x.is_neg():
            return None
        spec = _spec(x.dtype, x.shape, x.stride(), x.layout, x.device)
        address = x.data_ptr()  # RuntimeError, or 0, where `x` only stands for other tensors
        return (spec, address) if address or not spec.size else None

    def attributes(self) -> Attributes | None:
        torch: Any = sys.modules.get("torch")
        if torch is None:
            return None
        try:
            stream = _current_stream()
        except LookupError:
            stream = self.stream
        return Attributes(
            torch.Tensor,
            address="data_ptr()",
            strides="stride()",
            device="get_device()",
            on_gpu="is_cuda",
            contiguous="is_contiguous()",
            special=("requires_grad", "is_neg()", "is_conj()"),
            stream=stream,
            like=torch.empty_like,
        )

    def on_host(self, x: Any) -> HostArray:
        return self.host_view(x.cpu())

    def from_host(self, host: HostArray) -> Any:
        """A tensor on the memory of `host`; ValueError for negative strides or read-only memory."""
        import torch

        dtype = dtypes.of(host.dtype)
        native = _native(dtype)
        if any(stride < 0 for stride in host.strides):
            raise ValueError(
                f"torch has no negative strides, and this array has {host.strides}: pass a copy"
            )
        if not host.flags.writeable:
            raise ValueError(
                "torch has no read-only tensors, and this numpy array is read-only: pass a copy"
            )
        if not dtype.carrier:
            return torch.from_numpy(host)
        return torch.from_numpy(host.view(dtype.carrier)).view(native)

    def from_bytes(
        self, raw: HostArray, dtype: DType | str, shape: Sequence[int], strides: Sequence[int]
    ) -> Any:
        import torch

        known = dtypes.of(dtype)
        native = _native(known)
        whole = raw[: raw.size // known.itemsize * known.itemsize]
        return torch.from_numpy(whole).view(native).as_strided(tuple(shape), tuple(strides))

    def anchor(self, x: Any) -> int:
        """Where the storage starts."""
        return int(x.untyped_storage().data_ptr())

    def on_device(
        self,
        owner: Any,
        dtype: DType | str,
        shape: Sequence[int],
        strides: Sequence[int],
        *,
        start: int = 0,
    ) -> Any:
        import torch

        kind = dtypes.of(dtype)
        native = _native(kind)
        if 0 in shape:  # it has an address too, and keeps the owner alive
            raw = torch.as_tensor(owner, device=owner.device)
            whole = raw[: raw.numel() // kind.itemsize * kind.itemsize].view(native)
            return whole.as_strided(tuple(shape), tuple(strides))
        address = owner.__cuda_array_interface__["data"][0] + start
        view = _viewer(kind, tuple(shape), tuple(strides), owner.device)
        if view is not None:
            return view(owner, address)
        carrier = kind.carrier or kind.name
        part = _Part(owner, carrier, shape, strides, address)
        tensor = torch.as_tensor(part, device=owner.device)
        return tensor if carrier == kind.name else tensor.view(native)

    def viewer(
        self, dtype: DType | str, shape: Sequence[int], strides: Sequence[int], device: str
    ) -> Callable[[Any, int], Any]:
        view = _viewer(dtypes.of(dtype), tuple(shape), tuple(strides), device)
        return view or super().viewer(dtype, shape, strides, device)

    def maker(
        self, shape: Sequence[int], dtype: DType | str, order: Packed, device: str = "cpu"
    ) -> Callable[[], Any]:
        import torch

        extents, native, place = tuple(shape), _native(dtypes.of(dtype)), torch.device(device)
        if order == "C":
            return partial(torch.empty, extents, dtype=native, device=place)
        strides = packed_strides(extents, 1, order)
        return partial(torch.empty_strided, extents, strides, dtype=native, device=place)

    def offers(self, dtype: str) -> bool:
        import torch

        return hasattr(torch, dtype)

    def matmul(self, a: HostArray, b: HostArray, out: HostArray) -> bool:
        """See Library: oneDNN's product of bfloat16. It takes subnormal elements for 0."""
        if dtypes.of(out.dtype).name != "bfloat16" or a.size * b.shape[1] < _WORTH:
            return False
        taken = all(x.flags.writeable and min(x.strides) >= 0 for x in (a, b, out))
        if not taken or not _multiplies_bfloat16():
            return False
        import torch

        left, right, product = map(self.from_host, (a, b, out))
        torch.mm(left, right, out=product)
        return True

    def contiguous(self, x: Any) -> Any:
        return self.resolved(x).contiguous()

    def cast(self, x: Any, dtype: DType) -> Any:
        return x.to(_native(dtype))

    def resolved(self, x: Any) -> Any:
        return x.detach().resolve_conj().resolve_neg() if self.is_lazy(x) else x

    def transform(
        self, x: HostArray, axes: Sequence[int], function: str, norm: str, s: Sequence[int] | None
    ) -> HostArray:
        import torch

        if any(stride < 0 for stride in x.strides) or not x.flags.writeable:
            x = x.copy()
        result = getattr(torch.fft, function)(torch.from_numpy(x), s=s, dim=list(axes), norm=norm)
        return np.asarray(result.numpy())

    def stream(self, ordinal: int) -> int:
        try:
            return _current_stream()(ordinal)
        except LookupError:
            return 0

    def device(self, name: str) -> Any:
        import torch

        return torch.device(name)

    def default_dtype(self) -> DType:
        """The data type that torch defaults to, float32 unless the user set another."""
        import torch

        return dtypes.of(torch.get_default_dtype())


@cache
def _current_stream() -> Callable[[int], int]:
    """The function that returns a device's current stream: the one of torch's generated code.

    The public function, which serves where torch lacks it, makes an object first and takes ten
    times as long. Raises LookupError, which is not cached, until torch has initialized CUDA.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        raise LookupError("torch has not initialized CUDA")
    direct: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return direct or (lambda ordinal: int(torch.cuda.current_stream(ordinal).cuda_stream))


def _address(x: Any) -> int:
    """The address of the elements of `x`; 0 where it has none or only stands for other tensors."""
    try:
        return int(x.data_ptr())
    except RuntimeError:
        return 0


class _Part:
    """An array on a part of the memory of `owner`, as torch takes it; it keeps the owner alive."""

    def __init__(
        self, owner: Any, dtype: str, shape: Sequence[int], strides: Sequence[int], address: int
    ) -> None:
        native = np.dtype(dtype)
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": native.str,
            "data": (address, False),
            "strides": tuple([stride * native.itemsize for stride in strides]),
            "version": 3,
        }


def _viewer(
    dtype: DType, shape: tuple[int, ...], strides: tuple[int, ...], device: str
) -> Callable[[Any, int], Any] | None:
    """A function `view(owner, address)` that makes a tensor on memory of `device`, by dlpack.c.

    None where that was not built, and for tensors without elements, which have no address. Raises
    ValueError for a data type that torch lacks.
    """
    built, native = extension(_DLPACK), _native(dtype)
    if built is None or 0 in shape:
        return None
    import torch

    code = _BFLOAT if dtype.name == "bfloat16" else _CODES.get("" if dtype.carrier else dtype.kind)
    ordinal = -1 if device == "cpu" else int(device.removeprefix("cuda:"))
    passed = _INTEGERS if code is None else code
    capsule = partial(built.capsule, passed, 8 * dtype.itemsize, ordinal, shape, strides)
    from_capsule: Callable[[Any], Any] = torch.utils.dlpack.from_dlpack
    if code is None:
        return lambda owner, address: from_capsule(capsule(owner, address)).view(native)
    return lambda owner, address: from_capsule(capsule(owner, address))


@lru_cache(maxsize=1)
def _multiplies_bfloat16() -> bool:
    """Whether these cores have instructions for bfloat16, and torch has oneDNN."""
    import torch

    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(is_supported and is_supported() and torch.backends.mkldnn.is_available())


def _native(dtype: DType) -> Any:
    """Torch's own data type. Raises ValueError where torch has none like it."""
    import torch

    native = getattr(torch, dtype.name, None)
    if native is None:
        raise ValueError(f"torch has no data type {dtype}")
    return native


@lru_cache(maxsize=1024)
def _spec(
    of: Any, shape: tuple[int, ...], strides: tuple[int, ...], layout: Any, device: Any
) -> ArraySpec:
    """A spec, kept since a program passes tensors of the same few kinds again and again."""
    _require_strided(layout, device)
    dtype = dtypes.of(of)
    return ArraySpec(Torch.name, dtype.name, tuple(shape), strides, str(device), dtype.itemsize)


def _require_strided(layout: Any, device: Any) -> None:
    """Raise ValueError unless tensors of this layout have memory on `device`."""
    if str(layout) != "torch.strided" or device.type == "meta":
        raise ValueError(
            f"a torch tensor of layout {layout} on {device} has no strided memory; "
            "pass an ordinary dense tensor"
        )
