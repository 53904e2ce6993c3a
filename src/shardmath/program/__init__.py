"""Programs: what an operator does, as steps over named buffers, and what performs them.

A program is data, and the same words serve every machine: cores and GPUs perform it, and the tests
run all its ranks with NumPy in one process. Operators know no peer's memory: where buffers lie, and
how a move reaches another rank or another host, is decided when a program is lowered.
"""
