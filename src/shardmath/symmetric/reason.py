"""Why a rank gave an operation up, as it tells its peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["REASON_BYTES", "Reason"]

REASON_BYTES = 512


@dataclass(frozen=True)
class Reason:
    """`blamed` are the ranks whose fault it was, if not its own; `late`: they did not come."""

    why: str
    blamed: Sequence[int] = ()
    late: bool = False

    def pack(self) -> bytes:
        """REASON_BYTES: the end of a long text is cut off, zeros are behind a short one."""
        ranks = " ".join(map(str, self.blamed))
        text = f"{'late' if self.late else ''}|{ranks}|{self.why}".encode()
        return text[:REASON_BYTES].ljust(REASON_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> Reason:
        """What `pack` gave, with zeros behind it."""
        late, _, rest = data.rstrip(b"\0").decode(errors="replace").partition("|")
        ranks, _, why = rest.partition("|")
        return cls(why, [int(rank) for rank in ranks.split() if rank.isdigit()], bool(late))
