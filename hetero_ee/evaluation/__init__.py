"""Compares modes on a text: the speed of each mode, and how its output differs from full mode's."""
