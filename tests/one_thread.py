"""Imported before NumPy and torch: their products use one thread, here and in all that tests start.

Ranks share the cores of the machine, and threads that wait for each other would take from other
ranks what they spend on waiting. No thread of OpenMP's is there, which would not survive a fork.
"""

import os

for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[name] = "1"
