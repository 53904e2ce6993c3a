"""The call: one driver for all operators, from arguments that ranks describe to results.

What an operator's author writes, and what the driver does, is told in docs/adding-an-operator.md.
"""
