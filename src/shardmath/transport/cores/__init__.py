"""How peers reach the memory of cores: each module is a transport, found by its name."""
