"""Segments of layers on a GPU, and drafting on the GPU."""
