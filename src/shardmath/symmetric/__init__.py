"""Where is this object on rank r? The board of control words, the heap, handles on its arrays."""
