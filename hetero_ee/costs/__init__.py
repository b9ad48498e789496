"""Costs of a model's blocks in bytes, products and state."""
