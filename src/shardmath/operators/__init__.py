"""Operators on distributed arrays: agree, choose a strategy, plan, execute."""
