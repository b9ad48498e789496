"""Attention over KV caches, writing to KV caches, and rotary positions."""
