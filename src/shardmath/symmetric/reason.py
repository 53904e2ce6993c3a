"""Why a rank gave an operation up, as it tells its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardmath.errors import CollectiveMismatch, HeapExhausted, UseAfterFree

__all__ = ["REASON_BYTES", "Reason"]

REASON_BYTES = 512
_RAISED: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (CollectiveMismatch, UseAfterFree, HeapExhausted, ValueError, TypeError)
}


@dataclass(frozen=True)
class Reason:
    """`blamed` are the ranks whose fault it was, if not its own; `late`: they did not come.

    `raised` names the exception that all ranks are to raise, with the words of `why`, if any.
    """

    why: str
    blamed: Sequence[int] = ()
    late: bool = False
    raised: str = ""

    def pack(self) -> bytes:
        """REASON_BYTES: the end of a long text is cut off, zeros are behind a short one."""
        ranks = " ".join(map(str, self.blamed))
        kind = "late" if self.late else self.raised
        return f"{kind}|{ranks}|{self.why}".encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Reason:
        """What `pack` gave, with zeros behind it."""
        kind, _, rest = data.rstrip(b"\0").decode(errors="replace").partition("|")
        ranks, _, why = rest.partition("|")
        blamed = [int(rank) for rank in ranks.split() if rank.isdigit()]
        return cls(why, blamed, kind == "late", "" if kind == "late" else kind)

    @property
    def error(self) -> Exception | None:
        """The exception that all ranks are to raise, if there is one."""
        kind = _RAISED.get(self.raised)
        return None if kind is None else kind(self.why)
