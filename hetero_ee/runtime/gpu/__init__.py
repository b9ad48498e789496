"""Segments of layers on a GPU, and the choice of drafts there."""
