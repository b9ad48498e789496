"""A converted model on disk: written whole or not at all, opened by mmap, checked to the bit."""
