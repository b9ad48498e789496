"""Running the decoder: rows of tokens, the KV cache, the operations and the executor that walks the blocks."""
