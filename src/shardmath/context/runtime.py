"""The runtime of a process: connections to the peers, the transport, the heap, the GPU.

`initialize` makes it with the first context; contexts split from that one share it. Modules for
GPUs are imported only on ranks that compute on one.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from shardmath.base.config import Settings
from shardmath.base.recorder import this_process
from shardmath.context import agreement
from shardmath.errors import BackendUnavailable, HeapExhausted
from shardmath.group.base import ProcessGroup
from shardmath.inspection import job
from shardmath.local.freed_memory import keep_freed_memory
from shardmath.local.threads import ThreadLimit, threads_per_rank
from shardmath.symmetric.board import Board
from shardmath.symmetric.heap import Buffer, Heap, Location
from shardmath.symmetric.rows import MultiHostRows, Rows, board_bytes
from shardmath.symmetric.structs import pad_bytes
from shardmath.symmetric.waiting import WaitPolicy
from shardmath.transport import choice
from shardmath.transport.base import Transport
from shardmath.transport.cores.host import export_memory, map_memory
from shardmath.transport.mesh import Mesh

if TYPE_CHECKING:
    from shardmath.cuda.device import Device
    from shardmath.symmetric.accesses import AccessLog
    from shardmath.symmetric.team import Team


class Runtime:
    """Connections, transport and heap of a context and of those split from it.

    `transport` and `heap` exist after `open`. `threads` is the number of threads that this rank's
    arithmetic uses. `job_ranks` are those of the group.
    """

    transport: Transport
    heap: Heap
    device: Device | None = None  # None for ranks that compute on cores

    def __init__(self, group: ProcessGroup, settings: Settings) -> None:
        self.settings = settings
        self.job_ranks = tuple(group.job_ranks)
        self._job: Board | None = None  # the board of all ranks, once it is made
        self._log: AccessLog | None = None  # see `log_accesses`
        self.mesh = mesh = Mesh(
            group,
            settings.startup_timeout,
            pretended=settings.fake_hosts,
            address=settings.address,
            record=job.start(),
            heartbeat=settings.heartbeat,
        )
        here = [rank for rank in range(mesh.size) if mesh.same_host(rank)]
        self.job = job.Job(mesh.rank, mesh.pids, mesh.records, here, mesh.hosts[mesh.rank])
        self.threads = threads_per_rank(settings.threads, self.mesh.neighbour_pids)
        self._limit: ThreadLimit | None = None

    def compute_on(self, ordinal: int | None) -> None:
        """Compute on a CUDA device, or on the host's cores. Local."""
        if ordinal is not None:
            from shardmath.cuda.device import Device

            self.device = Device.of(ordinal)
            if this_process.on_gpu is not None:
                this_process.on_gpu()
        else:
            keep_freed_memory()
            self._limit = ThreadLimit(self.threads, self.settings.threads)

    def open(self, board: Board, group: ProcessGroup) -> None:
        """Make the transport that serves all ranks, and the heap. Collective.

        Raises BackendUnavailable where there is none.
        """
        kind, asked = "cpu" if self.device is None else "cuda", self.settings.transport
        refused = []
        for transport in choice.candidates(kind, asked):
            obstacles = agreement.agree(
                board, "initialize", partial(self._obstacle, transport, group), list
            )
            why = choice.in_words(obstacles)
            if not why:
                agreement.agree(board, "initialize", partial(self._create, transport), list)
                self.transport.join(group)
                return
            refused.append(f"{transport.name}: {why}")
        advice = "" if asked == choice.AUTO else "; leave SHARDMATH_TRANSPORT unset"
        raise BackendUnavailable(f"no transport serves these ranks ({'; '.join(refused)}){advice}")

    def _obstacle(self, transport: type[Transport], group: ProcessGroup) -> str:
        """Why this rank cannot use a transport; "" where it can."""
        why = transport.unreached(self.mesh, group)
        return why or transport.probe(0 if self.device is None else self.device.ordinal)

    def _create(self, transport: type[Transport]) -> None:
        self.transport = transport.create(self.mesh, self.device, self.settings)
        self.heap = Heap(
            self.transport, rank=self.mesh.rank, segment_bytes=self.settings.segment_bytes
        )

    def board(
        self, ranks: Sequence[int], rank: int, name: str, watch: Callable[[], None] = lambda: None
    ) -> Board:
        """A board for `ranks` (numbers of this mesh), of which this process is `rank`.

        Collective among them. No two boards have the same `name`; the first is that of all ranks.
        `watch()` is called now and then in a wait for a peer: it raises where the peer won't come.
        """
        mesh = self.mesh
        rows = self._rows(ranks, rank, name, watch)
        processes = [f"pid {mesh.pids[r]} on {mesh.hosts[r]}" for r in ranks]
        policy = WaitPolicy.of(
            self.settings.timeout, self.settings.notice, len(mesh.neighbour_pids)
        )
        board = Board(
            rows,
            watch=mesh.watch,
            numbers=ranks,
            processes=processes,
            policy=policy,
            job=self._job,
            look=self.job.look,
        )
        self._observe(board, name, ranks)
        if self._job is None:
            self._job = board
            self.job.elsewhere = board.names.last_of
        return board

    def log_accesses(self, board: Board, name: str) -> None:
        """Log accesses to symmetric memory where the peers see them, for SHARDMATH_CHECK=1.

        Collective. Does nothing for ranks on several hosts, or with GPUs.
        """
        if self.device is not None or len(set(self.mesh.host_of)) > 1:
            return
        from shardmath.symmetric.accesses import AccessLog, log_bytes

        size = self.mesh.size
        nbytes = log_bytes(size)
        memory = self._memory_of_host(range(size), "accesses", size * nbytes, lambda: None)
        logs = np.frombuffer(memory, np.uint8).reshape(size, nbytes)
        self._log = AccessLog(self.mesh.rank, [*logs])
        self._observe(board, name, range(size))

    def _observe(self, board: Board, name: str, ranks: Sequence[int]) -> None:
        if self._log is not None:
            from shardmath.symmetric.accesses import Observer

            board.observer = Observer(self._log, name, ranks)

    def _rows(self, ranks: Sequence[int], rank: int, name: str, watch: Callable[[], None]) -> Rows:
        """The rows of a board."""
        mesh, size = self.mesh, len(ranks)
        tag = "board " + blake2b(name.encode(), digest_size=24).hexdigest()
        memory = self._memory_of_host(ranks, tag, board_bytes(size), watch)
        numbers = {r: peer for r, peer in enumerate(ranks) if peer != mesh.rank}
        far = {r: peer for r, peer in numbers.items() if not mesh.same_host(peer)}
        if not far:
            return Rows(memory, rank=rank, size=size)
        assert mesh.wires is not None, "there are ranks on other hosts"
        return MultiHostRows(
            memory,
            rank=rank,
            size=size,
            far=far,
            near={r: peer for r, peer in numbers.items() if r not in far},
            wires=mesh.wires,
            name=name,
        )

    def _memory_of_host(
        self, ranks: Sequence[int], tag: str, nbytes: int, watch: Callable[[], None]
    ) -> mmap.mmap:
        """Zeroed memory that the ranks on this host share; the first of them makes it.

        Collective among them. Each such memory has another `tag`. `watch`: see `board`. Raises
        HeapExhausted.
        """
        mesh = self.mesh
        first, *others = [peer for peer in ranks if mesh.same_host(peer)]
        if first != mesh.rank:
            return map_memory(mesh.receive(first, tag, watch))
        try:
            fd, memory = export_memory(f"shardmath-{tag.partition(' ')[0]}", nbytes)
        except HeapExhausted as error:
            for peer in others:
                mesh.refuse(peer, tag, str(error))
            raise
        for peer in others:
            mesh.send(peer, tag, fd)
        os.close(fd)
        return memory

    def team(self, board: Board, ranks: Sequence[int]) -> Team | None:
        """The GPU side of a group; None on cores. Collective.

        It maps every peer's memory, and so finds out whether the devices can reach each other.
        """
        if self.device is None:
            return None
        from shardmath.symmetric.team import CHANNELS, FarTeam, Team

        device, transport = self.device, self.transport
        nbytes = pad_bytes(len(ranks), CHANNELS)

        def describe() -> tuple[Buffer, tuple[int, int, int, str]]:
            pad = self.heap.allocate(nbytes)
            device.zero(pad.block.address, nbytes)
            location = pad.block.location
            transport.announce(location.segment, ranks)
            return pad, (location.segment, location.offset, self.settings.check, device.uuid)

        pad, places = agreement.agree_keeping(board, "initialize: pads", describe, list)

        def attach() -> list[int | None]:
            for peer, (segment, *_) in zip(ranks, places, strict=True):
                if peer != self.mesh.rank:
                    transport.attach(peer, segment)
            return []

        agreement.agree(board, "initialize: peer access", attach, lambda _: None)
        addresses = [
            transport.address(peer, segment, offset, nbytes) or 0
            for peer, (segment, offset, *_) in zip(ranks, places, strict=True)
        ]
        shares_device = [uuid for *_, uuid in places].count(device.uuid) > 1
        if all(map(self.mesh.same_host, ranks)):
            team = Team(device, board, pad, addresses, shares_device=shares_device)
            team.meets = any(check for _, _, check, _ in places)
            return team
        far_team = FarTeam(device, board, pad, addresses, shares_device=shares_device)
        far = [rank for rank, peer in enumerate(ranks) if not self.mesh.same_host(peer)]
        far_team.locate(transport, ranks, {rank: Location(*places[rank][:2]) for rank in far})
        return far_team

    def close(self) -> None:
        """Close transport and connections; mappings that arrays still use stay.

        Where an exception ends it, it can be called again.
        """
        if hasattr(self, "transport"):
            self.transport.close()  # waits for what runs on the GPU
            self.heap.groups.forget_all()
        if self._limit is not None:
            self._limit.end()
        self.mesh.close()
