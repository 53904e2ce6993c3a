"""Redistribution: the same array, split otherwise."""
