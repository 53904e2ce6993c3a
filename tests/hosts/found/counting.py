"""A transport of the tests: the host's, which counts how often peers' memory is copied."""

from shardmath.transport.cores.host import HostTransport

__all__ = ["CountingTransport"]


class CountingTransport(HostTransport):
    """Found where its folder is among those of `shardmath.transport.cores`."""

    name = "counting"
    preference = -1
    refuses = ""  # why a probe says no
    copies = 0

    @classmethod
    def probe(cls, ordinal=0):
        return cls.refuses

    def get(self, rank, index, offset, into, stream=0):
        self.copies += 1
        super().get(rank, index, offset, into, stream)

    def put(self, rank, index, offset, data, stream=0):
        self.copies += 1
        super().put(rank, index, offset, data, stream)
