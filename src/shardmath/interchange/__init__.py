"""Calls with arrays of libraries that speak DLPack, and calls in programs that JAX compiles."""
