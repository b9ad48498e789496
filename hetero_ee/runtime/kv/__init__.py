"""KV caches: on the CPU, on a GPU, and several as one."""
