"""Rendezvous: the ranks of a group tell each other where their arrays lie, and get a handle.

A rank that has the handle of an array returns it without asking its peers: what they have dropped
meanwhile stays as it is until this rank has dropped the array, too. So ranks must bring arrays that
all of them have brought before, or that none has; where they do not, the exchange that some of them
begin meets the next call of the others, and raises.

`agreed_rendezvous` is always an exchange, in which each rank sends the number of the rendezvous
that it has kept for this array. If all send the same number, its handle is returned; else all make
a new one. What may fail on one rank (memory for a pad, mapping a peer's segment) comes before an
exchange, in which all ranks hear of the error.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from shardmath.arrays import Library, library_of
from shardmath.base.collective_call import collective_call
from shardmath.base.integers import up
from shardmath.context.agreement import require_equal
from shardmath.context.context import (
    Context,
    DistributedContext,
    get_context,
    open_contexts,
    require_context,
)
from shardmath.context.startup import begun
from shardmath.errors import UseAfterFree
from shardmath.group import ProcessGroup, as_process_group
from shardmath.handles.allocation import allocate_on_all_ranks, block_of
from shardmath.handles.handle import SymmetricMemory
from shardmath.handles.rendezvous_state import (
    SLOT_BYTES,
    FarSignals,
    PadSetting,
    PeerLocation,
    RendezvousState,
    pad_bytes,
)
from shardmath.handles.words import note_pad
from shardmath.symmetric import structs
from shardmath.symmetric.heap import Block, Buffer, Location

if TYPE_CHECKING:
    from shardmath.symmetric.team import Team


@collective_call
def rendezvous(tensor: Any, group: Any = None) -> SymmetricMemory:
    """The handle on the memory behind every rank's `tensor`. Collective among the ranks of `group`.

    `group` is None for the current context (or the group that the tensor was allocated for), a
    DistributedContext, a ProcessGroup, a torch.distributed group, an mpi4py communicator, or a name
    given to `set_group_info` or by torch.distributed. Shapes, dtypes, sizes and libraries may
    differ by rank. Tensors that all ranks have brought before get the same handle again: that is
    local, and raises UseAfterFree only on a rank that has freed its own.

    Raises on all ranks: ValueError when a rank's tensor is in ordinary memory, UseAfterFree when it
    was freed, HeapExhausted, CollectiveMismatch when the ranks' signal pad sizes differ.
    Source: torch.distributed._symmetric_memory.rendezvous.
    """
    context = context_of_group(_group_at_allocation(tensor) if group is None else group)
    context.require_open()
    return _kept(context, tensor) or _agreed(context, tensor)


def handle_of(tensor: Any) -> SymmetricMemory:
    """The handle of `tensor` in the current context, or in the oldest that knows it. Local.

    Where none knows it, that of a rendezvous in the current context, or in the group for which it
    was allocated: collective then, and raises as `rendezvous`.
    """
    kept = (_kept(context, tensor) for context in open_contexts())
    return next((handle for handle in kept if handle is not None), None) or rendezvous(tensor)


def agreed_rendezvous(tensor: Any, group: Any) -> SymmetricMemory:
    """As `rendezvous`, of tensors that some ranks may have brought before. Collective."""
    return _agreed(context_of_group(group), tensor)


def _kept(context: Context, tensor: Any) -> SymmetricMemory | None:
    """The handle that this rank has of the tensor, if any. Local.

    What is wrong with the tensor is left to `_agreed`, whose exchange tells all ranks. Raises
    UseAfterFree for a tensor that was freed after a rendezvous: its peers would make no exchange.
    """
    try:
        offset, buffer = _located(context, tensor)
    except UseAfterFree:
        freed = context.heap.find(library_of(tensor).pointer(tensor))
        if freed is not None and any(group == context.number for group, _ in freed.shared):
            raise
        return None
    except Exception:  # `_agreed` raises it again, on all ranks
        return None
    state = buffer.rendezvous_states.get((context.number, offset))
    return None if state is None else _handle_of(state, context, buffer, library_of(tensor))


def _agreed(context: Context, tensor: Any) -> SymmetricMemory:
    def describe() -> tuple[tuple[int, Buffer], tuple[int | None, list[int]]]:
        offset, buffer = _located(context, tensor)
        state = buffer.rendezvous_states.get((context.number, offset))
        number = None if state is None else state.number
        return (offset, buffer), (number, context.heap.marks(context.number))

    def check(specs: list[tuple[int | None, list[int]]]) -> tuple[bool, list[list[int]]]:
        numbers = {number for number, _ in specs}
        return len(numbers) == 1 and None not in numbers, [marks for _, marks in specs]

    (offset, buffer), (known, marks) = context.agree_keeping("rendezvous", describe, check)
    context.heap.apply_marks(context.number, marks)
    key = context.number, offset
    if not known:
        buffer.rendezvous_states[key] = _established(context, buffer.block, offset)
    state: RendezvousState = buffer.rendezvous_states[key]
    return _handle_of(state, context, buffer, library_of(tensor))


def register_group(name: str, group: ProcessGroup | DistributedContext) -> None:
    """Let `rendezvous` find `group` by `name` in the current context.

    Raises RuntimeError when the name is taken.
    """
    names = _names(require_context())
    if name in names:
        raise RuntimeError(f"the group name {name!r} is registered already: take another name")
    names[name] = group


def is_registered(name: str) -> bool:
    """Whether the current context knows a group of that name."""
    return name in _names(require_context())


def names_a_group(name: str) -> bool:
    """Whether `rendezvous` finds a group of that name."""
    context = get_context()
    known = context is not None and name in _names(context)
    return known or _torch_group(name) is not None


def _names(context: Context) -> dict[str, Any]:
    return context.cache("group names", dict)


def _located(context: Context, tensor: Any) -> tuple[int, Buffer]:
    """The offset of the tensor in its block, and the buffer there. Raises as `rendezvous`."""
    library_of(tensor, "tensor")
    place = block_of(context, tensor)
    buffer = None if place is None else place[0].buffer()
    if place is None or buffer is None:
        raise ValueError(
            "the tensor is in ordinary memory, which peers cannot reach; make it with "
            "shardmath.allocate_symmetric_memory or shardmath.symmetric_memory.empty"
        )
    return place[1], buffer


def _established(context: Context, block: Block, offset: int) -> RendezvousState:
    """The state of a new rendezvous, with the same number on all ranks. Collective."""

    def allocate() -> tuple[Buffer, tuple[int, ...]]:
        slots = PadSetting.setting
        pad = context.heap.allocate(_pad_bytes(context, slots))
        context.zero(pad)
        context.announce(block)
        location = block.location
        return pad, (location.segment, location.offset, block.nbytes, offset, slots)

    def check(notes: Sequence[tuple[int, ...]]) -> None:
        require_equal("the size of the signal pad", [slots for *_, slots in notes])

    memory = allocate_on_all_ranks(context, "rendezvous, places", allocate, check)
    pad_buffer = memory.buffer
    peers = [
        PeerLocation(Location(segment, start), nbytes, array_offset, pad, pad_size)
        for (segment, start, nbytes, array_offset, pad_size), pad in zip(
            memory.notes, memory.locations, strict=True
        )
    ]

    def attach() -> RendezvousState:
        nbytes, reach = _pad_bytes(context, peers[0].pad_size), context.peer_memory
        arrays = [reach(rank, peer.location, peer.nbytes) for rank, peer in enumerate(peers)]
        pads = [reach(rank, peer.pad, nbytes) for rank, peer in enumerate(peers)]
        state = RendezvousState(-1, peers, arrays, pads, pad_buffer)
        state.team = _team(context, state)
        return state

    state = context.on_all_ranks("rendezvous, reach", attach)
    # Two numbers: array and pad may be dropped at different times.
    state.number, pad_number = context.next_shared_id(), context.next_shared_id()
    if context.multi_host and context.team is None:
        state.far = FarSignals(context, state)
    note_pad(context, state)
    context.heap.share(block, context.number, state.number)
    context.heap.share(pad_buffer.block, context.number, pad_number)
    return state


def _pad_bytes(context: Context, slots: int) -> int:
    """Bytes of a pad: on GPUs, a team's own pad follows the slots."""
    if context.team is None:
        return pad_bytes(slots, context.size)
    channels = slots // (SLOT_BYTES * context.size)
    return _team_start(slots) + structs.pad_bytes(context.size, channels)


def _team_start(slots: int) -> int:
    return up(slots, structs.PAD_ALIGNMENT)


def _team(context: Context, state: RendezvousState) -> Team | None:
    """The team that signals through the pads of `state`, for a context of GPUs."""
    whole = context.team
    if whole is None:
        return None
    slots = state.peers[0].pad_size
    start = _team_start(slots)
    pads = [int(address) and int(address) + start for address in state.pad_table]
    far = {rank: state.peers[rank].pad.behind(start) for rank, pad in enumerate(pads) if not pad}
    channels = slots // (SLOT_BYTES * context.size)
    return whole.with_pads(state.pad_buffer, pads, far, channels)


# -- which ranks -----------------------------------------------------------------------------------


def _group_at_allocation(tensor: Any) -> str | None:
    """The name of the group that the tensor was allocated for; agreement reports what is wrong."""
    try:
        return _located(require_context(), tensor)[1].group
    except (ValueError, UseAfterFree):
        return None


def context_of_group(group: Any) -> DistributedContext:
    """The context that computes for `group`. Collective among its ranks, the first time; among all,
    where that makes the context of a program of torch.distributed.
    """
    context = None if isinstance(group, DistributedContext) else begun()
    if isinstance(group, str):
        assert context is not None
        group = _named(context, group)
    if isinstance(group, DistributedContext):
        return group
    assert context is not None
    if group is None:
        return context
    known: dict[int, tuple[Any, DistributedContext]] = context.cache("groups", dict)
    if id(group) not in known:
        talking = as_process_group(group, device_id=context.device_id)
        texts = talking.allgather_bytes(context.rank.to_bytes(4, "little"))
        ranks = [int.from_bytes(text, "little") for text in texts]
        same = ranks == list(range(context.size))
        # The group is kept, so that no other object gets its id.
        known[id(group)] = (group, context if same else context.subset(ranks))
    return known[id(group)][1]


def _named(context: Context, name: str) -> Any:
    group = _names(context).get(name) or _torch_group(name)
    if group is not None:
        return group
    raise ValueError(
        f"no group is called {name!r}: pass the group itself, tell its ranks with set_group_info, "
        "or leave it out for all ranks"
    )


def _torch_group(name: str) -> Any:
    """torch.distributed's group of that name, or None."""
    torch_groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if torch_groups is not None:
        with suppress(RuntimeError, LookupError, ValueError):
            return torch_groups._resolve_process_group(name)
    return None


def _handle_of(
    state: RendezvousState, context: Context, buffer: Buffer, library: Library
) -> SymmetricMemory:
    """The handle for arrays of `library`: the same object while anything refers to it."""
    known = state.handles.get(library.name)
    handle = known() if known is not None else None
    if handle is None:
        kind: type[SymmetricMemory] = SymmetricMemory
        if state.team is not None:
            from shardmath.handles.device_handle import DeviceSymmetricMemory

            kind = DeviceSymmetricMemory
        handle = kind(context, state, buffer, library)
        reference = state.handles[library.name] = weakref.ref(handle)
        buffer.block.handles = [
            *(one for one in buffer.block.handles if one() is not None),
            reference,
        ]
    return handle
