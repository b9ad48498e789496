"""Decoding: sampling tokens from logits, ending texts, and the loop that runs all sequences."""
