"""What a GPU runs: segments of layers, their operations, weights and buffers."""
