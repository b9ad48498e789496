"""Speculative and early-exit decoding: drafting tokens, verifying them, and skipping layers."""
