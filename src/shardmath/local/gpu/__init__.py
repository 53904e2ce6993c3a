"""One rank's arithmetic on its GPU: products by cuBLASLt, and what follows them, on addresses.

Matrices are given as `Matrix`: nothing here knows an array library, a context or a peer. Everything
is put on a stream and returns at once.
"""

from shardmath.local.gpu.matrix import Matrix

__all__ = ["Matrix"]
