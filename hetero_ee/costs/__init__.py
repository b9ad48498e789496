"""Compute the costs of a model's blocks: bytes, matrix products and state."""
