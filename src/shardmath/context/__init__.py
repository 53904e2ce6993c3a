"""Contexts: who computes together, over which memory, from start to end."""
