"""Batches of tokens, and the KV caches of their sequences: on the CPU, on a GPU, or spread over several devices."""
