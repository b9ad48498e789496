"""Constrained output: which tokens may follow, and which must."""
