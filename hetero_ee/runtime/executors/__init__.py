"""What runs the decoder's blocks: the Executor protocol and its implementations."""
