"""Batches of tokens, and the KV caches that hold their sequences: on the CPU, on a GPU, and several as one."""
