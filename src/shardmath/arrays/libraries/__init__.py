"""The array libraries, one file each; `detect` finds them by their names."""
