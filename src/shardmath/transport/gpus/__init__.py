"""How peers reach the memory of GPUs: each module is a transport, found by its name."""
