"""Executors, which run a decoder's blocks: the protocol and its implementations."""
