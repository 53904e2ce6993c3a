"""One GPU as seen by one rank: the driver, run-time compilation, launches and streams.

Nothing here is imported before a rank has asked for a CUDA device.
"""
