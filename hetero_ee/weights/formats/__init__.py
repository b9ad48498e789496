"""Matrices that safetensors checkpoints hold otherwise than as floats, a format a file."""
