"""What one stream of a rank's GPU writes, the other must not touch at the same time."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "program"))

from streams import streams_of

from shardmath.factorisations import gpus, steps
from shardmath.program.rank_program import Copy, View
from shardmath.program.steps import Move

__all__ = ["unordered"]

READS, WRITES, NOTES = "reads", "writes", "notes"  # notes of the least code may come in any order
TOUCHED = {  # by type: the fields that name blocks, buffers or views, and what is done to these
    steps.Fill: {"target": WRITES},
    steps.CheckFinite: {"source": READS, "status": NOTES},
    steps.Conjugate: {"target": WRITES},
    steps.SetIdentity: {"target": WRITES},
    steps.Clear: {"target": WRITES},
    steps.KeepLower: {"columns": WRITES},
    steps.FactoriseCholesky: {"panel": WRITES, "status": NOTES},
    steps.FactoriseLU: {"panel": WRITES, "pivots": WRITES, "status": NOTES},
    steps.ExchangeRows: {"pivots": READS, "target": WRITES, "status": NOTES},
    steps.Substitute: {"triangle": READS, "target": WRITES, "status": NOTES},
    steps.Subtract: {"left": READS, "right": READS, "target": WRITES},
    gpus.PackFactor: {"source": READS, "target": WRITES},
    gpus.SubtractPacked: {"left": READS, "right": READS, "target": WRITES},
    gpus.Least: {"source": READS, "target": WRITES},
    Copy: {"source": READS, "target": WRITES},
}


def unordered(program, rank):
    """Pairs of steps on two streams, of which one writes what the other touches, and neither waits
    for the other.
    """
    found, streams = streams_of(program.steps)
    place = {at: (name, i) for name, own in streams.items() for i, at in enumerate(own)}
    clocks = []  # of each step: how many steps of each stream are done when it is
    for at, (_, awaited) in enumerate(found):
        name, i = place[at]
        clock = {}
        for before in (*awaited, *([streams[name][i - 1]] if i else [])):
            clock = {key: max(clock.get(key, 0), clocks[before].get(key, 0))
                     for key in (*clock, *clocks[before])}  # fmt: skip
        clocks.append(clock | {name: i + 1})
    touched = [touches(step, program, rank) for step, _ in found]
    wrong = []
    for one in range(len(found)):
        for name in streams.keys() - {place[one][0]}:
            # Those of the other stream that this one does not wait for, until one waits for it.
            for two in streams[name][clocks[one].get(name, 0) :]:
                if clocks[two].get(place[one][0], 0) > place[one][1]:
                    break
                if one < two and any(conflict(x, y) for x in touched[one] for y in touched[two]):
                    wrong.append((str(found[one][0]), str(found[two][0])))
    return wrong


def touches(step, program, rank):
    """(memory, buffer, rows and columns or None for all, what is done) of each block of a step."""
    if isinstance(step, Move):
        sources = [move.src for move in step.transfer.into(rank)]
        named = [(step.source, READS)] * (rank in sources) + [(step.target, WRITES)] * bool(sources)
    else:
        named = [(getattr(step, name), what) for name, what in TOUCHED.get(type(step), {}).items()]
    made = []
    for part, what in named:
        if isinstance(part, View):
            made.append((part.memory, part.memory, None, what))
        elif isinstance(part, steps.Cut):
            if not part.is_empty:
                extents = part.rows, part.columns
                made.append((program.arrays[part.buffer].memory, part.buffer, extents, what))
        elif part:
            made.append((program.arrays[part].memory, part, None, what))
    return made


def conflict(one, two):
    """Whether two blocks overlap, and what is done to them depends on the order."""
    if one[0] != two[0] or one[3] == two[3] != WRITES:
        return False
    if one[1] != two[1] or None in (one[2], two[2]):
        return True
    return all(a < d and c < b for (a, b), (c, d) in zip(one[2], two[2], strict=True))
