"""Programs written for the references find every name, its arguments, their order and defaults.

Each row has the signature of nvmath.distributed (0.9 or 1.0) or of torch's SymmetricMemory. Ours may
have more arguments behind them, by name or with a default, and defaults where theirs has none.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest

# ruff: noqa: E501
NVMATH = {
    "initialize": lambda device_id, process_group, backends: 0,
    "finalize": lambda: 0,
    "get_context": lambda: 0,
    "allocate_symmetric_memory": lambda shape, package, *, dtype=None, axis_order="C", make_symmetric=False, skip_symmetric_check=False, logger=None: (
        0
    ),
    "free_symmetric_memory": lambda *tensors: 0,
    "MPIProcessGroup": lambda mpi_comm: 0,
    "TorchProcessGroup": lambda *, device_id, torch_process_group=None, logger=None: 0,
    "ProcessGroup.broadcast_buffer": lambda self, array, *, root=0: 0,
    "ProcessGroup.allreduce_buffer": lambda self, array, *, op: 0,
    "ProcessGroup.allreduce_object": lambda self, obj, *, op: 0,
    "distribution.ProcessGrid": lambda *, shape=None, layout=None, process_array=None: 0,
    "distribution.Distribution.copy": lambda self: 0,
    "distribution.Distribution.shape": lambda self, rank, global_shape=None: 0,
    "distribution.Distribution.to": lambda self, cls, /, *, ndim=None, copy=False: 0,
    "distribution.Slab": lambda partition_dim, ndim=None: 0,
    "distribution.Box": lambda lower, upper: 0,
    "distribution.BlockCyclic": lambda process_grid, block_sizes, *, first_process=None: 0,
    "distribution.BlockNonCyclic": lambda process_grid, *, first_process=None: 0,
    "distribution.redistribute": lambda operand, /, input_distribution, output_distribution, *, sync_symmetric_memory=True, options=None, stream=None: (
        0
    ),
    "distribution.Redistribute": lambda operand, /, input_distribution, output_distribution, *, options=None, stream=None: (
        0
    ),
    "distribution.Redistribute.plan": lambda self, stream=None: 0,
    "distribution.Redistribute.execute": lambda self, stream=None, release_workspace=False, sync_symmetric_memory=True: (
        0
    ),
    "distribution.Redistribute.reset_operand": lambda self, operand, *, stream=None: 0,
    "distribution.Redistribute.reset_operand_unchecked": lambda self, operand, *, stream=None: 0,
    "distribution.Redistribute.release_operand": lambda self: 0,
    "distribution.Redistribute.free": lambda self: 0,
    "distribution.RedistributeOptions": lambda logger=None, blocking="auto": 0,
    "reshape.reshape": lambda operand, /, input_box, output_box, *, sync_symmetric_memory=True, options=None, stream=None: (
        0
    ),
    "reshape.Reshape": lambda operand, /, input_box, output_box, *, options=None, stream=None: 0,
    "reshape.Reshape.execute": lambda self, stream=None, release_workspace=False, sync_symmetric_memory=True: (
        0
    ),
    "reshape.ReshapeOptions": lambda logger=None, blocking="auto": 0,
    **{
        f"fft.{name}": lambda operand, /, *, distribution, sync_symmetric_memory=True, options=None, stream=None: (
            0
        )
        for name in ("fft", "ifft", "rfft", "irfft")
    },
    "fft.allocate_operand": lambda shape, package, *, input_dtype=None, distribution, memory_space=None, fft_type=None, logger=None: (
        0
    ),
    "fft.FFT": lambda operand, /, *, distribution, options=None, stream=None: 0,
    "fft.FFT.plan": lambda self, *, stream=None: 0,
    "fft.FFT.execute": lambda self, *, direction=None, stream=None, release_workspace=False, sync_symmetric_memory=True: (
        0
    ),
    "fft.FFT.reset_operand": lambda self, operand, *, distribution, stream=None: 0,
    "fft.FFT.reset_operand_unchecked": lambda self, operand, *, distribution, stream=None: 0,
    "fft.FFT.release_operand": lambda self: 0,
    "fft.FFT.free": lambda self: 0,
    "fft.FFTOptions": lambda fft_type=None, redistribute=True, last_axis_parity="even", logger=None, blocking="auto": (
        0
    ),
    "linalg.advanced.matmul": lambda a, b, /, c=None, *, distributions, alpha=None, beta=None, epilog=None, epilog_inputs=None, qualifiers=None, quantization_scales=None, options=None, preferences=None, stream=None: (
        0
    ),
    "linalg.advanced.Matmul": lambda a, b, /, c=None, *, distributions, alpha=None, beta=None, qualifiers=None, quantization_scales=None, options=None, stream=None: (
        0
    ),
    "linalg.advanced.Matmul.plan": lambda self, *, preferences=None, epilog=None, epilog_inputs=None, stream=None: (
        0
    ),
    "linalg.advanced.Matmul.execute": lambda self, *, release_workspace=False, stream=None: 0,
    "linalg.advanced.Matmul.reset_operands": lambda self, *, a=None, b=None, c=None, alpha=None, beta=None, quantization_scales=None, epilog_inputs=None, stream=None: (
        0
    ),
    "linalg.advanced.Matmul.reset_operands_unchecked": lambda self, *, a=None, b=None, c=None, alpha=None, beta=None, quantization_scales=None, epilog_inputs=None, stream=None: (
        0
    ),
    "linalg.advanced.Matmul.release_operands": lambda self: 0,
    "linalg.advanced.Matmul.free": lambda self: 0,
    "linalg.advanced.MatmulOptions": lambda inplace=False, compute_type=None, scale_type=None, result_type=None, algo_type=None, result_amax=False, block_scaling=False, sm_count_communication=None, logger=None, blocking="auto": (
        0
    ),
    "linalg.direct_solver": lambda a, b, /, *, distributions, options=None, stream=None: 0,
    "linalg.DirectSolver": lambda a, b, /, *, distributions, options=None, stream=None: 0,
    "linalg.DirectSolver.plan": lambda self, *, stream=None: 0,
    "linalg.DirectSolver.factorize": lambda self, *, stream=None: 0,
    "linalg.DirectSolver.solve": lambda self, *, stream=None: 0,
    "linalg.DirectSolver.reset_operands": lambda self, *, a=None, b=None, stream=None: 0,
    "linalg.DirectSolver.reset_operands_unchecked": lambda self, *, a=None, b=None, stream=None: 0,
    "linalg.DirectSolver.release_operands": lambda self: 0,
    "linalg.DirectSolver.free": lambda self: 0,
    "linalg.DirectSolverOptions": lambda logger=None, blocking="auto", inplace_a=True, inplace_b=True, handle=None: (
        0
    ),
    "linalg.advanced.MatmulPlanPreferences": lambda epilog=None: 0,
    "linalg.advanced.MatmulEpilogPreferences": lambda aux_type=None, aux_amax=False: 0,
    "linalg.advanced.MatmulQuantizationScales": lambda a=None, b=None, c=None, d=None: 0,
}
TORCH = {
    "empty": lambda *size, dtype=None, device=None: 0,
    "rendezvous": lambda tensor, group: 0,
    "set_backend": lambda name: 0,
    "get_backend": lambda device: 0,
    "get_mem_pool": lambda device: 0,
    "reduce_scatter_offset": lambda input, out, group, *, dim, offsets=None, dst_ranks=None, red_op="sum": (
        0
    ),
    "_SymmetricMemory.get_mempool_allocator": lambda device: 0,
    "set_signal_pad_size": lambda size: 0,
    "get_signal_pad_size": lambda: 0,
    "is_symm_mem_tensor": lambda tensor: 0,
    "is_nvshmem_available": lambda: 0,
    "get_symm_mem_workspace": lambda group_name, min_size: 0,
    "enable_symm_mem_for_group": lambda group_name: 0,
    "is_symm_mem_enabled_for_group": lambda group_name: 0,
    "get": lambda dst, hdl, peer, offset=0: 0,
    "put_signal": lambda src, hdl, peer: 0,
    "wait_signal": lambda hdl, peer: 0,
    "_SymmetricMemory.set_group_info": lambda group_name, rank, world_size, store: 0,
    "_SymmetricMemory.empty_strided_p2p": lambda size, stride, dtype, device, group_name=None, alloc_id=None: (
        0
    ),
    "_SymmetricMemory.has_multicast_support": lambda device_type, device_idx: 0,
    "_SymmetricMemory.memset32": lambda tensor, offset, val, count=1: 0,
    "_SymmetricMemory.stream_write_value32": lambda tensor, offset, val: 0,
    "_SymmetricMemory.get_buffer": lambda self, rank, sizes, dtype, storage_offset=0: 0,
    "_SymmetricMemory.get_remote_tensor": lambda self, peer, sizes, dtype: 0,
    "_SymmetricMemory.get_signal_pad": lambda self, rank, sizes=(), dtype=None, storage_offset=0: 0,
    "_SymmetricMemory.barrier": lambda self, channel=0, timeout_ms=0: 0,
    "_SymmetricMemory.put_signal": lambda self, dst_rank, channel=0, timeout_ms=0: 0,
    "_SymmetricMemory.wait_signal": lambda self, src_rank, channel=0, timeout_ms=0: 0,
}
COMPUTE_TYPES = (
    "COMPUTE_16F COMPUTE_16F_PEDANTIC COMPUTE_32F COMPUTE_32F_PEDANTIC COMPUTE_64F "
    "COMPUTE_64F_PEDANTIC COMPUTE_32I COMPUTE_32I_PEDANTIC COMPUTE_32F_FAST_16F "
    "COMPUTE_32F_FAST_16BF COMPUTE_32F_FAST_TF32 COMPUTE_32F_EMULATED_16BFX9 "
    "COMPUTE_64F_EMULATED_FIXEDPOINT"
)
PROPERTIES = {
    "symmetric_memory._SymmetricMemory": (
        "rank world_size device buffer_ptrs buffer_ptrs_dev signal_pad_ptrs signal_pad_ptrs_dev "
        "buffer_size signal_pad_size offset multicast_ptr"
    ),
    "distribution.Slab": "name partition_dim ndim X Y Z",
    "distribution.Box": "lower upper box_shape ndim",
    "distribution.ProcessGrid": "shape layout process_array Layout",
    "ProcessGroup": "rank nranks",
    "TorchProcessGroup": "allreduce_obj_buffer_size",
    "DistributedContext": "nvshmem_available nccl_comm",
    "process_group.ReductionOp": "SUM MIN MAX",
    "linalg.ComputeType": COMPUTE_TYPES,
    "linalg.advanced.MatmulComputeType": COMPUTE_TYPES,
}
ROWS = [*NVMATH.items(), *((f"symmetric_memory.{name}", form) for name, form in TORCH.items())]


def found(name: str) -> Any:
    """What `shardmath.<name>` is, where modules may be packages."""
    thing: Any = importlib.import_module("shardmath")
    for part in name.split("."):
        thing = getattr(thing, part)
    return thing


@pytest.mark.parametrize(("name", "theirs"), ROWS, ids=[name for name, _ in ROWS])
def test_signature(name: str, theirs: Callable[..., Any]) -> None:
    ours = [*inspect.signature(found(name)).parameters.values()]
    asked = [*inspect.signature(theirs).parameters.values()]
    by_name = {parameter.name: parameter for parameter in ours}
    for place, parameter in enumerate(asked):
        mine = by_name[parameter.name]
        assert mine.kind == parameter.kind
        assert mine.default == parameter.default or parameter.default is parameter.empty
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            assert ours[place].name == parameter.name
    added = [one for one in ours if one.name not in {parameter.name for parameter in asked}]
    assert all(one.default is not one.empty for one in added)


@pytest.mark.parametrize("name", PROPERTIES)
def test_attributes(name: str) -> None:
    kind = found(name)
    slots = {slot for base in kind.__mro__ for slot in getattr(base, "__annotations__", ())}
    missing = [each for each in PROPERTIES[name].split() if not hasattr(kind, each)]
    assert not [each for each in missing if each not in slots]


def test_an_older_name_of_an_option() -> None:
    options = found("fft.FFTOptions")
    assert options(reshape=False) == options(redistribute=False)
    assert options("R2C", False, "odd", None, True) == options(
        fft_type="R2C", redistribute=False, last_axis_parity="odd", blocking=True
    )


def test_a_context_shows_what_programs_need() -> None:
    """What the package itself asks of a context is `context.Context`'s, and no user's."""
    shown = {name for name in vars(found("DistributedContext")) if not name.startswith("_")}
    methods = {"barrier", "close", "recover", "split", "subset"}
    assert shown == methods | {"nccl_comm", "nvshmem_available"}
    fields = {"rank", "size", "device_id", "process_group", "nccl_comm"}
    named = found("DistributedContext").__annotations__
    assert {name for name in named if not name.startswith("_")} == fields
