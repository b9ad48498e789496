"""Checks of `hetero-ee doctor`. Each is a function that returns a finding."""
