"""Quantization formats of matrices in safetensors checkpoints, one per file."""
