"""The Executor protocol, which runs a decoder's blocks, and its implementations."""
