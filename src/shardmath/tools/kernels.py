"""What a traced rank's GPU does, and when: kernels and copies, as torch's profiler collects them.

The profiler (Kineto, on CUPTI) has the device's own times, and converts them to CLOCK_REALTIME. The
operations of a rank are recorded in CLOCK_MONOTONIC; the difference of the two is taken at the
start. Nothing here is imported unless a program is traced, nor torch unless it computes on a GPU.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

_KINDS: Mapping[str, Literal["kernel", "copy", "set"]] = {
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "set",
}
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_TRIES = 5  # readings of the two clocks, of which the closest counts


class Work(NamedTuple):
    """A kernel, a copy or a memset on a stream of a GPU.

    Times are nanoseconds of CLOCK_MONOTONIC. `launched` is when the host's call began, 0 where that
    is not known, as for a graph. `nbytes` is 0 for kernels.
    """

    name: str
    kind: Literal["kernel", "copy", "set"]
    begun: int
    ended: int
    device: int
    stream: int
    nbytes: int
    launched: int


class Collector:
    """Collects the work of this process's GPU from `start` to `stop`.

    `tell` gets each `Work`, or a text that says why nothing was collected.
    """

    def __init__(self, tell: Callable[[Work | str], None]) -> None:
        self._tell = tell
        self._pid = os.getpid()
        self._profile: Any = None
        self._tried = False
        self._offset = 0

    def start(self) -> None:
        """Collect from now on. It does not raise: a trace without kernels is still one."""
        if self._tried:
            return
        self._tried = True
        try:
            import torch
            from torch.autograd.profiler import _set_is_profiler_enabled
        except ImportError:
            self._tell('kernels are shown by torch\'s profiler: pip install "shardmath[torch]"')
            return
        try:
            activity = torch.profiler.ProfilerActivity.CUDA
            if activity not in torch.profiler.supported_activities():
                self._tell("kernels are not shown: this torch is built without CUDA's profiler")
                return
            self._offset = realtime_minus_monotonic()
            profile = torch.profiler.profile(activities=[activity])
            profile.start()
            _set_is_profiler_enabled(False)  # else calls would be ranges of it, and not compiled
            self._profile = profile
        except Exception as error:  # of CUPTI's, which another profiler may hold
            self._tell(f"kernels are not shown: {error}")

    def stop(self) -> None:
        """Tell what was collected, once the device has done it."""
        profile, self._profile = self._profile, None
        if profile is None or os.getpid() != self._pid:
            return
        try:
            profile.stop()
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "kernels.json"
                profile.export_chrome_trace(str(path))
                document = json.loads(path.read_bytes())
        except Exception as error:
            self._tell(f"kernels are not shown: {error}")
            return
        for work in works_of(document, self._offset):
            self._tell(work)


def realtime_minus_monotonic() -> int:
    """The difference of the two clocks in nanoseconds, as read within the shortest time."""
    readings = []
    for _ in range(_TRIES):
        before, real, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        readings.append((after - before, real - (before + after) // 2))
    return min(readings)[1]


def works_of(document: Mapping[str, Any], offset: int) -> list[Work]:
    """The work in a trace that Kineto has exported. `offset` is `realtime_minus_monotonic()`.

    Times there are microseconds from `baseTimeNanoseconds` on. What was launched has the
    correlation number of the call that launched it.
    """
    base = int(document.get("baseTimeNanoseconds", 0)) - offset

    def begun(event: Mapping[str, Any]) -> int:
        return base + round(1e3 * float(event["ts"]))

    boxes = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    launched: dict[int, int] = {}
    for event in boxes:
        number = event.get("args", {}).get("correlation")
        if event.get("cat") in _LAUNCHES and number is not None:
            # A call of the runtime's has the one of the driver's that it makes within it.
            launched[number] = min(begun(event), launched.get(number, begun(event)))
    works = []
    for event in boxes:
        kind, said = _KINDS.get(event.get("cat", "")), event.get("args", {})
        if kind is not None:
            start = begun(event)
            places = int(said.get("device", event["pid"])), int(said.get("stream", event["tid"]))
            sizes = int(said.get("bytes", 0)), launched.get(said.get("correlation"), 0)
            works.append(
                Work(event["name"], kind, start, start + round(1e3 * event["dur"]), *places, *sizes)
            )
    return sorted(works, key=lambda work: (work.begun, work.ended))


def lanes(works: Iterable[Work]) -> dict[tuple[int, int, int], list[Work]]:
    """Work by device, stream and lane: what overlaps on one stream, as a kernel does that begins
    while the one before it ends, goes to another lane, since boxes of a line may not overlap.
    """
    found: dict[tuple[int, int, int], list[Work]] = {}
    for work in sorted(works, key=lambda work: (work.device, work.stream, work.begun)):
        lane = 0
        while (line := found.get((work.device, work.stream, lane))) and line[-1].ended > work.begun:
            lane += 1
        found.setdefault((work.device, work.stream, lane), []).append(work)
    return dict(sorted(found.items()))


def stream_name(device: int, stream: int, lane: int) -> str:
    """What a line of `lanes` is called."""
    return f"GPU {device}, stream {stream}{', beside' if lane else ''}"


def short(name: str) -> str:
    """The name of a kernel without its result, namespaces, template and arguments."""
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    if plain.startswith(("Memcpy", "Memset")):
        return plain
    ends = [plain.find(mark) for mark in "<(" if plain.find(mark) > 0]
    return plain[: min(ends, default=len(plain))].rpartition("::")[2]
