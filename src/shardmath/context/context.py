"""A context: the ranks that compute together, their board, and their symmetric memory.

`startup` makes contexts; `split` and `subset` return contexts of some of the ranks, which share the
parent's transport and heap and have a board of their own. Operators use the context that `with` has
made current. Closing a context writes a word on its board and never waits for a peer.
"""

from __future__ import annotations

import itertools
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import numpy as np

from shardmath.base import current
from shardmath.base.collective_call import collective_call, settled
from shardmath.base.integers import index
from shardmath.base.lru_cache import LRUCache
from shardmath.context import agreement
from shardmath.context.runtime import Runtime
from shardmath.errors import HeapExhausted, RankFailure
from shardmath.group.base import ProcessGroup
from shardmath.machine import OnHosts
from shardmath.symmetric.board import Board, OperationGuard
from shardmath.symmetric.groups import Groups
from shardmath.symmetric.heap import Block, Buffer, Location
from shardmath.transport.base import Bytes, DeviceBytes, Memory, Transport

if TYPE_CHECKING:
    from shardmath.symmetric.accesses import Observer
    from shardmath.symmetric.team import Team
    from shardmath.transport.wires import Channel, Deliver

Agreed = TypeVar("Agreed")
T = TypeVar("T")

_KEPT = 64  # choices of operands with derivatives
_UNCHECKED = 8  # digits of them that are kept as they are

_contexts: weakref.WeakSet[Any] = weakref.WeakSet()
_numbers = itertools.count()


class Context(OnHosts):
    """Ranks, their board and their memory: the part of a `DistributedContext` for this package.

    `heap` is this rank's symmetric memory; `board` the words that the ranks share; `team` what
    their GPUs share, None on cores; `number` identifies the context within this process; `closed`
    says why it can no longer be used, None where it can; `caches`: see `cache`.
    """

    def __init__(
        self,
        runtime: Runtime,
        board: Board,
        team: Team | None,
        *,
        ranks: Sequence[int],
        device_id: int | str,
        process_group: ProcessGroup | None,
        parent: Context | None = None,
        name: str = "board",
    ) -> None:
        self.device_id = device_id
        self.process_group = process_group
        self.board = board
        self.team = team
        self.rank = board.rank
        self.size = board.size
        self.number = next(_numbers)
        self.heap = runtime.heap
        self.hosts = tuple([runtime.mesh.host_of[rank] for rank in ranks])
        self._runtime = runtime
        self._ranks = tuple(ranks)  # each rank's number in the mesh
        self._parent = parent
        self._name = name  # the same on all its ranks, and no other context's
        self._splits = 0
        # By the ranks: the number of subsets made of them, and the last one.
        self._subsets: dict[tuple[int, ...], tuple[int, DistributedContext | None]] = {}
        self._shared_ids = itertools.count()
        self.closed: str | None = None
        self._is_ended = False  # whether `close` has nothing to do: an exception may have ended it
        self.caches: dict[Any, Any] = {}
        self.again: dict[Any, Any] = {}  # repeated calls of public functions: see direct.c
        self.repeats: Any = None  # repeated collectives on GPUs, compiled: see collectives.repeats
        self.heaps: Any = None  # addresses of all ranks' heaps, for kernels: see collectives.heaps
        self.derivatives = ""  # what ranks compare of the call under way: see `with_derivatives`
        self._unchecked = ""  # what they compare later: see `note_derivatives`
        self._again_with: LRUCache[str, dict[Any, Any]] = LRUCache(_KEPT)  # `again`, by derivatives
        # A context that is dropped without `close` leaves, too: peers must not wait for its memory.
        drop = None if team is None else team.drop
        leaving = board, drop, self.heap.groups, self.number
        self._dropping = weakref.finalize(self, _leave, *leaving)
        self._dropping.atexit = False
        self._announced: set[int] = set()  # the segments that all its ranks can attach
        if team is not None:
            self.heap.groups.watch(self.number, team.gave_up)
        self._outlived: list[Any] = []  # memory of ended parts, which peers may still read
        _contexts.add(self)

    def with_derivatives(self, which: str, call: Callable[..., T], *arguments: Any) -> T:
        """`call(*arguments)`, in which the ranks compare which operands have derivatives.

        `which` has a digit for each operand: 1 where it requires grad, 2 where it has a tangent, 3
        for both, else 0. It is a part of the operation's name, so comparing costs no exchange; what
        `note_derivatives` has noted follows, after a blank.
        """
        if self._unchecked:
            which, self._unchecked = f"{which} {self._unchecked}", ""
        if not which:
            return call(*arguments)
        again = self.again  # without derivatives: the same arguments would find those calls
        try:
            self.again, self.derivatives = self._again_with.made(which, dict), which
            return call(*arguments)
        finally:
            self.again, self.derivatives = again, ""

    def note_derivatives(self, which: str) -> None:
        """Let the ranks compare `which` in the next call of `with_derivatives`. Local."""
        if not self._unchecked and not which.strip("0"):
            return
        self._unchecked += which
        if len(self._unchecked) > _UNCHECKED:
            self._unchecked = blake2b(self._unchecked.encode(), digest_size=4).hexdigest()

    @property
    def gpu_team(self) -> Team:
        """The team, for code that runs in contexts of GPUs alone."""
        assert self.team is not None, "a context of GPUs"
        return self.team

    @property
    def job_ranks(self) -> tuple[int, ...]:
        """The number of each rank in the job: see `ProcessGroup.job_ranks`."""
        return tuple([self._runtime.job_ranks[rank] for rank in self._ranks])

    @property
    def transport(self) -> str:
        """The name of the transport to peers' memory."""
        return self._runtime.transport.name

    @property
    def compares_copies(self) -> bool:
        """Whether ranks compare their copies of replicated operands in each call."""
        return bool(self._runtime.settings.check) and self.team is None

    @property
    def observer(self) -> Observer | None:
        """The observer of accesses to symmetric memory, with SHARDMATH_CHECK=1 on cores."""
        return self.board.observer

    def __repr__(self) -> str:
        state = f" ({self.closed})" if self.closed else ""
        return f"DistributedContext(rank {self.rank} of {self.size} on {self.device_id}){state}"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a DistributedContext is this process's own, and is neither copied nor pickled: pass "
            "the object itself; another process calls initialize"
        )

    # -- agreement ---------------------------------------------------------------------------------

    def agree(
        self, operation: str, describe: Callable[[], Any], check: Callable[[list[Any]], Agreed]
    ) -> Agreed:
        """See `agreement.agree`. Collective."""
        self.require_open()
        return agreement.agree(self.board, operation, describe, check)

    def agree_keeping(
        self,
        operation: str,
        describe: Callable[[], tuple[T, Any]],
        check: Callable[[list[Any]], Agreed],
    ) -> tuple[T, Agreed]:
        """See `agreement.agree_keeping`. Collective."""
        self.require_open()
        return agreement.agree_keeping(self.board, operation, describe, check)

    def on_all_ranks(self, operation: str, make: Callable[[], T]) -> T:
        """What `make()` returns here, once it has returned on every rank. Collective.

        Raises on every rank what it raised on one.
        """
        return self.agree_keeping(operation, lambda: (make(), None), lambda _: None)[0]

    def gather(self, operation: str, describe: Callable[[], bytes]) -> list[bytes]:
        """See `agreement.gather`. Collective."""
        self.require_open()
        return agreement.gather(self.board, operation, describe)

    def executing(self, operation: str) -> OperationGuard:
        """A `with` for the work after agreement: an error in it ends the peers' waits at once."""
        return OperationGuard(self.board, operation)

    # -- memory ------------------------------------------------------------------------------------

    def announce(self, block: Block) -> None:
        """Let every peer attach the segment of `block`. Local.

        Must precede the exchange that tells peers where the block lies.
        """
        block.announced_to.add(self.number)
        self.announce_segment(block.location.segment)

    def announce_segment(self, segment: int) -> None:
        """Let every peer attach a segment of this rank's heap. Local."""
        if segment not in self._announced:  # a segment that was announced is never taken back
            self.board.names.call(self._runtime.transport.announce, segment, self._ranks)
            self._announced.add(segment)

    def announced_segments(self) -> dict[tuple[int, int], int]:
        """The addresses here, by rank and segment, of the segments that peers have announced and
        whose announcements have arrived. Local.
        """
        transport, ranks = self._runtime.transport, {r: i for i, r in enumerate(self._ranks)}
        return {
            (ranks[peer], segment): address
            for peer, segment in transport.held()
            if peer in ranks and ranks[peer] != self.rank
            if (address := self.peer_address(ranks[peer], Location(segment, 0), 1)) is not None
        }

    def allocate_shared(self, nbytes: int) -> Buffer:
        """Memory of the heap that every peer can attach. Local; must precede an exchange, as
        `announce`. Raises HeapExhausted.
        """
        buffer = self.heap.allocate(nbytes)
        self.announce(buffer.block)
        return buffer

    def peer_bytes(self, rank: int, location: Location, nbytes: int) -> Bytes | None:
        """Memory that `rank` has announced, for cores; None where it has no address here."""
        memory = self.peer_memory(rank, location, nbytes)
        return None if isinstance(memory, DeviceBytes) else memory

    def peer_memory(self, rank: int, location: Location, nbytes: int) -> Memory | None:
        """Memory that `rank` has announced, for arrays; None where it has no address here."""
        transport, peer = self._reach(rank, location)
        return transport.view(peer, location.segment, location.offset, nbytes)

    def peer_address(self, rank: int, location: Location, nbytes: int) -> int | None:
        """The address of memory that `rank` has announced, for this rank's cores or GPU, if any."""
        transport, peer = self._reach(rank, location)
        return transport.address(peer, location.segment, location.offset, nbytes)

    def _reach(self, rank: int, location: Location) -> tuple[Transport, int]:
        """The transport, with the segment of `rank` attached, and the rank's number there."""
        transport, peer = self._runtime.transport, self._ranks[rank]
        if rank != self.rank:
            self.board.names.call(transport.attach, peer, location.segment)
        return transport, peer

    def same_host(self, rank: int) -> bool:
        """Whether `rank` is on this rank's host: its memory has addresses here."""
        return self.hosts[rank] == self.hosts[self.rank]

    def read_bytes(
        self,
        rank: int,
        location: Location,
        nbytes: int,
        pieces: Iterable[tuple[int, int]] | None = None,
    ) -> Bytes:
        """Memory that `rank` has announced, for cores to read: in place, or a copy made now.

        `pieces`, where given, are the (start, end) of the bytes to copy; the others stay unset.
        """
        memory = self.peer_bytes(rank, location, nbytes)
        if memory is None:
            memory = np.empty(nbytes, np.uint8)
            transport, peer = self._reach(rank, location)
            for low, high in [(0, nbytes)] if pieces is None else pieces:
                if low < high:
                    place, part = location.offset + low, memory[low:high]
                    self.board.names.call(transport.get, peer, location.segment, place, part)
        return memory

    def get(self, rank: int, location: Location, into: Memory, stream: int = 0) -> None:
        """Fill `into` from memory that `rank` has announced. See `Transport.get`."""
        transport, peer = self._reach(rank, location)
        self.board.names.call(transport.get, peer, location.segment, location.offset, into, stream)

    def put(self, rank: int, location: Location, data: Memory, stream: int = 0) -> None:
        """Write `data` to memory of `rank`, which sees it after a later signal or exchange."""
        transport, peer = self._reach(rank, location)
        self.board.names.call(transport.put, peer, location.segment, location.offset, data, stream)
        self.board.names.call(transport.quiet, peer, stream)

    def zero(self, buffer: Buffer) -> None:
        """Set memory of this rank's heap to zero."""
        if self._runtime.device is not None:
            self._runtime.device.zero(buffer.block.address, buffer.block.nbytes)
        else:
            np.asarray(buffer)[:] = 0

    def channel(self, number: int, deliver: Deliver) -> Channel:
        """Messages between this context's ranks of different hosts: see `wires.Channel`.

        `number` is 1 or more, and greater than that of any channel before. `deliver` gets this
        context's numbers of ranks.
        """
        wires = self._runtime.mesh.wires
        assert wires is not None, "there are ranks on other hosts"
        return wires.open(self._name, number, deliver, self._ranks)

    def next_shared_id(self) -> int:
        """The number of the next object that the ranks of this context share, the same on all."""
        return next(self._shared_ids)

    def cache(self, name: Any, make: Callable[[], T]) -> T:
        """This context's object of that name: made when first asked for, dropped at the end."""
        if name not in self.caches:
            self.caches[name] = make()
        kept: T = self.caches[name]
        return kept

    def keep_for_kernels(self, buffer: Buffer) -> None:
        """Keep heap memory until this context and the kernels of all its ranks have ended.

        For memory that kernels write and no array refers to: kernels may run on after `close`.
        """
        self.heap.groups.keep(self.number, buffer)

    def keep_for_readers(self, memory: Any) -> None:
        """Let `memory`, whose readers this rank does not wait for, outlive this context.

        It stays until the next split of the parent, when all ranks have finished in this context.
        """
        if self._parent is not None:
            weakref.finalize(self, self._parent._outlived.append, memory).atexit = False

    @property
    def threads(self) -> int:
        """The number of threads of this rank's arithmetic, the same in all contexts of a job."""
        return self._runtime.threads

    def show(self, why: str) -> None:
        """Show on stderr where all ranks of the job are."""
        self._runtime.job.show(why)

    # -- end ---------------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise RuntimeError when the context can no longer be used, saying why."""
        if self.closed:
            raise RuntimeError(f"this context cannot be used: {self.closed}")

    def announce_close(self, why: str) -> None:
        """Let no peer wait for more operations of this context, which has no parent.

        Contexts that were split off it are closed. Peers' kernels wait for this rank's kernels
        until these have ended.
        """
        self._close_parts(why)
        if self.team is not None:
            self.team.leave()

    def _close_parts(self, why: str) -> None:
        for context in list(_contexts):
            if context._runtime is self._runtime and context is not self:
                context.close(why)

    def abandon(self, why: str) -> None:
        """Make the context unusable in this process, a forked child, and tell nobody."""
        self.closed, self._is_ended = why, True
        self._dropping.detach()  # it would say on the board that the parent process has left
        self._runtime.mesh.abandon()


class DistributedContext(Context):
    """The ranks that compute together, as seen by one of them. Made by `initialize`.

    `rank` is this process's number, from 0 to `size` - 1. `device_id` is "cpu" or the index of a
    CUDA device, `process_group` the group through which the ranks found each other.
    `nvshmem_available` and `nccl_comm`, which is None, are there for programs written for
    nvmath.distributed.

    The ranks' calls are matched by their order. So only one thread at a time may use a context, and
    threads that compute at the same time have one each: a call during another thread's raises
    RuntimeError.

    `with context:` makes it the current context of this thread, which operators use, until the end.
    """

    nccl_comm: ClassVar[None] = None
    rank: int
    size: int
    device_id: int | str
    process_group: ProcessGroup | None
    # The context that `recover` has made in place of this one; and the one in whose place this one
    # is made, until this rank knows that all ranks have it.
    _replaced_by: DistributedContext | None = None
    _replaces: DistributedContext | None = None

    @property
    def nvshmem_available(self) -> bool:
        """Whether the ranks' memory is NVSHMEM's."""
        return self.transport == "nvshmem"

    @collective_call
    def barrier(self) -> None:
        """Wait until every rank has called it. Collective.

        What a rank wrote before it, all ranks see after it. Memory that every rank has dropped can
        be used again afterwards. Raises OpTimeout and RankFailure.
        """
        self.require_open()
        if self.team is not None:
            self.team.check_collectives()
        own = self.heap.marks(self.number)
        texts = self.board.exchange("barrier", struct.pack(f"={len(own)}Q", *own))
        if all(texts):
            marks = [struct.unpack(f"={len(text) // 8}Q", text) for text in texts]
            self.heap.apply_marks(self.number, marks)

    @collective_call
    def split(self, color: int | None, key: int = 0) -> DistributedContext | None:
        """A context of the ranks that gave the same `color`, ordered by (`key`, rank). Collective.

        None for a rank that gave None. The new context has the same memory, and synchronises its
        ranks independently: calls of both may be mixed in any order. Raises TypeError for a color
        or key that is not an integer.
        """

        def describe() -> tuple[int | None, int]:
            return None if color is None else index(color, "color"), index(key, "key")

        choices = self.agree("split", describe, lambda specs: specs)
        self._outlived.clear()
        self._splits += 1
        own, _ = choices[self.rank]
        members = [r for _, r in sorted((k, r) for r, (c, k) in enumerate(choices) if c == own)]
        name = f"{self._name} / split {self._splits} color {own}"

        def make() -> Board | None:
            if own is None:
                return None
            sender = next(rank for rank in members if self.same_host(rank))
            board = self._board(members, name, partial(self._require_sender, sender))
            board.enter("split")  # an interrupt is told to peers that wait there, too
            return board

        board = self.on_all_ranks("split", make)  # it may fail on one rank alone
        return None if board is None else self._derive(members, name, board, parent=self)

    @collective_call
    def subset(self, ranks: Sequence[int]) -> DistributedContext:
        """A context of these ranks of this one, in this order. Collective among them alone.

        The same ranks in the same order get the same context again, unless it has been closed,
        which all of them must do then. Raises ValueError when `ranks` names a rank twice, one that
        does not exist, or not this one.
        """
        self.require_open()
        if not isinstance(ranks, Iterable):
            raise TypeError(f"ranks is a sequence of integers, not {ranks!r}")
        chosen = tuple(index(rank, "a rank") for rank in ranks)
        strangers = [rank for rank in chosen if not 0 <= rank < self.size]
        if strangers or len(set(chosen)) < len(chosen) or self.rank not in chosen:
            raise ValueError(
                f"rank {self.rank} of {self.size} belongs to no subset {chosen}; name ranks of "
                "this context, each once, this one among them"
            )
        count, last = self._subsets.get(chosen, (0, None))
        if last is None or last.closed:
            self._subsets[chosen] = count + 1, None  # a name that fails is not used again
            self.board.enter("subset")
            name = f"{self._name} / subset {chosen} number {count}"
            last = self._derive(chosen, name, self._subset_board(chosen, name), parent=self)
            self._subsets[chosen] = count + 1, last
        return last

    def _subset_board(self, ranks: Sequence[int], name: str) -> Board:
        """A board that all of `ranks` have, or none. Collective among them.

        A rank that cannot have it says so on the board of this context, where the others look while
        they wait. Then all raise HeapExhausted, and this context remains usable.
        """

        def error_of(peers: Sequence[int]) -> Exception | None:
            refusal = self.board.peers.refusal(peers, name)
            return self._ended_error(peers) if refusal is None else settled(refusal)

        def watch() -> None:
            error = error_of(ranks)
            if error is not None:
                raise error

        try:
            board = self._board(ranks, name, watch)
        except HeapExhausted as error:
            self.board.peers.refuse(name, str(error))
            watch()
            raise
        board.enter("subset")
        board.meet("subset", lambda late: error_of([ranks[rank] for rank in late]))
        return board

    def _board(
        self, ranks: Sequence[int], name: str, watch: Callable[[], None] = lambda: None
    ) -> Board:
        """A board of `ranks`, which all of them make under this name. See `Runtime.board`."""
        self.heap.recycle()  # drops the boards of groups that have ended
        mesh_ranks = [self._ranks[r] for r in ranks]
        return self._runtime.board(mesh_ranks, list(ranks).index(self.rank), name, watch)

    def _ended_error(self, ranks: Iterable[int]) -> Exception | None:
        """The exception to raise where one of these ranks, this one aside, has died, left or given
        up, else None.
        """
        return self.board.peers.ended_error([r for r in ranks if r != self.rank])

    def _require_sender(self, sender: int) -> None:
        """Raise where a rank has ended, or where `sender` has gone on without sending memory."""
        error = self._ended_error(range(self.size))
        if error is not None:
            raise error
        if self.board.peers.is_ahead(sender):
            raise RankFailure(
                f"{self.board.names.name(sender)} gave up making the memory of a new context",
                [sender],
            )

    def _derive(
        self, ranks: Sequence[int], name: str, board: Board, *, parent: Context | None
    ) -> DistributedContext:
        """A context of `ranks`, over a board of that name."""
        mesh_ranks = [self._ranks[r] for r in ranks]
        return DistributedContext(
            self._runtime,
            board,
            self._runtime.team(board, mesh_ranks),
            ranks=mesh_ranks,
            device_id=self.device_id,
            process_group=None,
            parent=parent,
            name=name,
        )

    # -- life --------------------------------------------------------------------------------------

    @collective_call
    def recover(self) -> DistributedContext:
        """A context of the ranks that remain, in which all of them can compute. Collective.

            except shardmath.errors.RankFailure:
                context = context.recover()

        It serves after any failure: an interrupted call, a timeout, a mismatch, a rank that has
        died. Every rank that lives calls it, each from wherever it is: calls in this context that
        still wait end with RankFailure. The new context has the same order of ranks, without those
        that are gone, and is the default one if this one was; this one is closed. Arrays on the
        heap remain as they are; handles and operator objects are made anew.

        Raises OpTimeout where a rank that lives does not call it, naming it, and RankFailure where
        the others have gone on without this rank or an exception has left it on one of them. Then,
        and after such an exception, it can be called again on the same context.
        """
        chain = [self]
        while (later := chain[-1]._replaced_by) is not None:  # made by a call that was interrupted
            chain.append(later)
        chain[-1].require_open()
        while True:
            context = chain[-1]
            gone = context.board.peers.gone()
            try:
                made = context._successor()
                break
            except RankFailure as error:
                if context._void_error() is not None:
                    chain.pop()
                    chain[-1]._drop_successor()
                elif context.board.asked_again() or context._is_successor_void():
                    context._drop_successor()
                elif context.board.peers.gone() == gone:
                    raise settled(error) from None
                elif context._replaced_by is not None:  # some rank may have returned it
                    chain.append(context._replaced_by)
        if current.default() in chain:
            current.set_default(made)
        teams = [context.team for context in chain if context.team is not None]
        for context in chain:
            context._leave_to(made)
        for team in teams:
            team.wait_for_kernels()  # so that memory they write can be reused now rather than later
            self.heap.recycle()
        made._replaces = None
        return made

    def _successor(self) -> DistributedContext:
        """The context of the ranks that remain, which takes the place of this one. Collective.

        A rank keeps it before it says so in the last exchange. So when any rank returns from here,
        all have it, and an exception can take it from none of them: the next `recover` begins
        there. A rank that has none calls here again, and the others follow. Raises RankFailure
        where a rank is gone, has called again, or was interrupted.
        """
        if self.team is not None:
            self.team.abort()  # kernels of a call that was given up may wait for ever
        ranks = self.board.survivors(self._void_error)
        name = f"{self._name} / recovery {self.board.recoveries}"
        void = self._void_error()  # found out since: a rank that left is taken to be gone
        if void is not None:
            raise void

        def error_of(_: object = None) -> Exception | None:
            gone = sorted(self.board.peers.gone().intersection(ranks))
            if gone:
                return self.board.names.failure_of(gone, "is gone")
            return self._asked_again_error() or self._void_error()

        def watch() -> None:
            error = error_of()
            if error is not None:
                raise error

        board = self._board(ranks, name, watch)
        board.enter("recover")
        board.meet("recover", error_of)
        made = self._derive(ranks, name, board, parent=self._parent)
        made._replaces, self._replaced_by = self, made
        transport, peers = self._runtime.transport, made._ranks
        held = agreement.agree(made.board, "recover", transport.held, list)
        for peer, segments in zip(peers, held, strict=True):
            known = {index for owner, index in segments if owner == peers[made.rank]}
            transport.forget_announcements(peer, known)
        made.process_group = self.process_group if len(ranks) == self.size else None
        return made

    def _asked_again_error(self) -> Exception | None:
        """The exception to raise where a rank has called `recover` again, else None."""
        again, names = self.board.asked_again(), self.board.names
        if not again:
            return None
        return RankFailure(
            f"{names.where()}: {names.name(again[0])} has called recover() again", again
        )

    def _void_error(self) -> Exception | None:
        """The exception to raise where a rank knows nothing of this context; else None.

        That rank has called `recover` again of the context that this one replaces, or is about to:
        it has left this one, which it dropped where an exception struck, and not the other, which
        every rank leaves first that keeps this one.
        """
        before = self._replaces
        if before is None:
            return None
        left = {self._ranks[rank] for rank in self.board.peers.left()}
        left -= {before._ranks[rank] for rank in before.board.peers.gone()}
        if not left:
            return before._asked_again_error()
        ranks = [rank for rank, number in enumerate(before._ranks) if number in left]
        names = before.board.names
        return RankFailure(f"{names.where()}: {names.name(ranks[0])} has to recover again", ranks)

    def _is_successor_void(self) -> bool:
        """Whether this context has made one of which some rank knows nothing."""
        made = self._replaced_by
        return made is not None and made._void_error() is not None

    def _drop_successor(self) -> None:
        """End what `_successor` has made, which some ranks do not have."""
        made, self._replaced_by = self._replaced_by, None
        if made is not None:
            made._end("a rank was interrupted before it had this context, and recover() began anew")
            made._is_ended = True

    def _leave_to(self, successor: DistributedContext) -> None:
        """End this context, and leave what it shares with others to its successor."""
        for context in list(_contexts):
            if context._parent is self:
                context._parent = successor
        self._end("recover() has replaced it by the context that it returned")
        self._is_ended = True

    def __enter__(self) -> DistributedContext:
        self.require_open()
        before = current.overridden()
        try:
            current.override(self)
        except BaseException:  # an interrupt: the block is not entered
            current.reset(before)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        before = current.overridden()
        try:
            current.restore(self)
        except BaseException:
            if before and before[-1] is self:  # an interrupt: the block is left nevertheless
                current.reset(before[:-1])
            raise

    def close(self, why: str = "it was closed") -> None:
        """End the context on this rank; later calls raise RuntimeError with `why`. Local.

        Where an exception ends it, a second call does the rest.
        Peers that wait for this rank in it raise RankFailure. After it this rank must not use views
        of peers' memory that it got through this context.
        """
        if self._is_ended:
            return
        made = self._replaced_by
        if made is not None:  # by a `recover` that was interrupted
            self._end(why)  # first: see `_void_error`
            made.close(why)
        else:
            self._end(why)
            if self._parent is None:
                self._close_parts(why)
                self._runtime.close()
        if current.default() is self:
            current.set_default(None)
        self._is_ended = True

    def _end(self, why: str) -> None:
        """End this context alone; what it shares with others stays."""
        self.closed = self.closed or why
        self.board.leave(why)
        self._dropping()
        if self.team is not None:
            self.team.leave()  # at once; the finalizer only takes note
        self.team = None
        self.caches.clear()
        self.again.clear()
        self._again_with.clear()
        self.repeats = None


def get_context() -> DistributedContext | None:
    """The current context: the innermost `with` one, else the one `initialize` made, else None."""
    context = current.get()
    return context if isinstance(context, DistributedContext) else None


def require_context() -> DistributedContext:
    """The current context. Raises RuntimeError, saying what to call, when there is none."""
    context = current.get()
    if not isinstance(context, DistributedContext):
        if current.is_forked():
            raise RuntimeError(
                "this process was forked off a rank, as the workers of a DataLoader are, and is no "
                "rank itself: make the call in the rank's own process"
            )
        raise RuntimeError(
            'shardmath is not initialized: call shardmath.initialize("cpu") (or with the index of '
            "a CUDA device) on every rank first"
        )
    if context.closed:
        context.require_open()
    return context


def _leave(board: Board, drop: Callable[[], None] | None, groups: Groups, number: int) -> None:
    """Leave a context. Its memory is free when no rank runs, or no kernel of a peer is at work."""
    board.leave()
    if drop is None:
        groups.leave(number, board.peers.none_runs)
    else:
        drop()
        groups.leave(number, lambda: not board.peers.at_work())


def open_contexts() -> list[DistributedContext]:
    """Every open context of this process: the current one first, then by age, the oldest first."""
    now = get_context()
    others = sorted(set(_contexts) - {now}, key=lambda context: context.number)
    return [c for c in ([now] if now is not None else []) + others if not c.closed]
