"""Streaming of weights: they are copied to the GPU as each pass needs them."""
