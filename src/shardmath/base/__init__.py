"""Settings, callers, caches, plain data on its way between ranks: for all of the package."""
