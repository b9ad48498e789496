"""Running the decoder: batches, executors, KV caches, devices and what a GPU runs."""
