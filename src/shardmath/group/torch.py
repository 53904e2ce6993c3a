"""The ranks of a torch.distributed process group, gloo's or NCCL's.

Only tensors of plain numbers travel: torch's object collectives would unpickle what a peer sends.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

from shardmath.base.config import Settings
from shardmath.base.log import package_logger
from shardmath.errors import BootstrapError, RankFailure
from shardmath.group.base import GatheringGroup

if TYPE_CHECKING:
    from logging import Logger

MIN_ALL_REDUCE_OBJ_BUFFER_SIZE: Final = 128  # bytes
"""The least `TorchProcessGroup.allreduce_obj_buffer_size`."""

_CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class TorchProcessGroup(GatheringGroup):
    """The ranks of `torch_process_group`, by default of torch.distributed's default group.

    `device_id` is "cpu", or the CUDA device over which a GPU-only backend talks. Raises ValueError
    when it is neither or does not suit the backend, RuntimeError when torch.distributed has not
    been initialised. Waits end after `timeout` seconds.
    """

    def __init__(
        self,
        *,
        device_id: int | Literal["cpu"],
        torch_process_group: Any = None,
        logger: Logger | None = None,
        timeout: float | None = None,
    ) -> None:
        if device_id != "cpu" and (not isinstance(device_id, int) or isinstance(device_id, bool)):
            raise ValueError(
                f"device_id is {device_id!r}; expected 'cpu' or a CUDA device's number"
            )
        distributed: Any = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_initialized():
            raise RuntimeError(
                "torch.distributed is not initialised: call torch.distributed.init_process_group "
                "before TorchProcessGroup"
            )
        backends = distributed.get_backend_config(torch_process_group)
        if device_id == "cpu" and "cpu" not in backends:
            raise ValueError(
                f"device_id is 'cpu', but the group's backends ({backends}) serve GPUs only: pass "
                "the number of this rank's CUDA device, or make the group with 'cpu:gloo,cuda:nccl'"
            )
        group = torch_process_group
        super().__init__(int(distributed.get_rank(group)), int(distributed.get_world_size(group)))
        self._distributed = distributed
        self._torch: Any = sys.modules["torch"]
        self._group = group
        self._device = "cpu" if "cpu" in backends else f"cuda:{device_id}"
        self._timeout = Settings.from_environment().startup_timeout if timeout is None else timeout
        self._buffer_size = 2048
        self.device_id = device_id
        (logger or package_logger()).info("%r over %s", self, backends)

    @property
    def job_ranks(self) -> Sequence[int]:
        """The global rank of each rank of the group, as torch numbers them."""
        return [int(rank) for rank in self._distributed.get_process_group_ranks(self._group)]

    @property
    def allreduce_obj_buffer_size(self) -> int:
        """Kept for programs that set it. Objects of any size travel here: nothing depends on it.

        Raises ValueError when set below `MIN_ALL_REDUCE_OBJ_BUFFER_SIZE`.
        """
        return self._buffer_size

    @allreduce_obj_buffer_size.setter
    def allreduce_obj_buffer_size(self, size: int) -> None:
        if size < MIN_ALL_REDUCE_OBJ_BUFFER_SIZE:
            raise ValueError(
                f"allreduce_obj_buffer_size is {size}; the least is "
                f"{MIN_ALL_REDUCE_OBJ_BUFFER_SIZE}"
            )
        self._buffer_size = size

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """The `data` of every rank, in the order of the ranks. Collective; sizes may differ."""
        sizes = [
            int.from_bytes(part, "little")
            for part in self._gather(len(data).to_bytes(8, "little"), 8)
        ]
        parts = self._gather(data, max(sizes))
        return [part[:size] for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, data: bytes, size: int) -> list[bytes]:
        """Every rank's `data`, padded to `size` bytes, which is the same on all."""
        if size == 0:
            return [b""] * self.nranks
        torch = self._torch
        own = torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)
        own = own.to(self._device)
        gathered = [torch.empty_like(own) for _ in range(self.nranks)]
        try:
            work = self._distributed.all_gather(gathered, own, group=self._group, async_op=True)
            work.wait(timedelta(seconds=self._timeout))
        except RuntimeError as error:
            raise self._explained(error) from error
        return [part.cpu().numpy().tobytes() for part in gathered]

    def _explained(self, error: RuntimeError) -> RankFailure | BootstrapError:
        message = f"rank {self.rank}: a gather of {self.nranks} ranks over torch failed: {error}"
        if any(sign in str(error) for sign in _CLOSED):
            return RankFailure(message)
        return BootstrapError(message)
