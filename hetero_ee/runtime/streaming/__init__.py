"""Weights that are copied to the GPU as each pass needs them."""
