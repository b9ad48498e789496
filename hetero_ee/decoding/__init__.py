"""Turning logits into text: sampling, stopping, incremental text, and the loop around the executor."""
