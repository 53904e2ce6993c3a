"""What works here, and who computes together? The commands that show it."""
