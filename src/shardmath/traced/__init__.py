"""What a compiler has to know of a call in advance: its arguments, and the shape of its result."""
