"""`python -m shardmath run`, which loads torch, if the program names it, before it forks ranks.

So it is loaded once, not by every rank: `preloaded.py -n N PROGRAM`.
"""

import sys
from pathlib import Path

from shardmath.__main__ import main

if __name__ == "__main__":
    program = Path(sys.argv[-1]).read_text()
    if "import torch" in program:
        import torch
    if "torch.optim" in program:
        import torch._dynamo  # noqa: F401  (its first step does)
    sys.exit(main(["run", *sys.argv[1:]]))
