"""What all of the house uses: settings, callers, caches, plain data on its way between ranks."""
