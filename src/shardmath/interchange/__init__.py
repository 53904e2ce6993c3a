"""How are functions called with arrays of any other library, also while JAX compiles the call?"""
