"""Weights: checkpoints, the int4 format and its torch reference, quantizers, the store on disk."""
