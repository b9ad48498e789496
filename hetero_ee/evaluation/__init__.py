"""Modes side by side on a text: how fast each generates, and what it changes of what full mode says."""
