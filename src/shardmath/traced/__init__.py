"""What a compiler knows of a call before it is made: its words, and the shape of its result."""
