"""One rank's arithmetic on its own arrays: no ranks, no communication, NumPy views in and out."""
