"""Self-speculative decoding: draft, wait, verify."""
