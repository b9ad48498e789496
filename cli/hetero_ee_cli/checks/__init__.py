"""Checks of `hetero-ee doctor`. Each check is a function that returns a finding."""
