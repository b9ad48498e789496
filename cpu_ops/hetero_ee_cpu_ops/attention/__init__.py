"""Attention over KV caches, what writes them, and rotary positions."""
