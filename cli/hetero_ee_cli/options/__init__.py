"""Flags, stated once for every command that takes them."""
