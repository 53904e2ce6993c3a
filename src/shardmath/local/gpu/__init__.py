"""One rank's arithmetic on its GPU: products by cuBLASLt, and what follows them, on addresses.

Matrices are given as `Matrix`: nothing here knows an array library, a context or a peer. Functions
put work on a stream and return at once.
"""

from shardmath.local.gpu.matrix import Matrix

__all__ = ["Matrix"]
