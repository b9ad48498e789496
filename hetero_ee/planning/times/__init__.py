"""Estimates of a plan's seconds and bytes from a hardware profile."""
