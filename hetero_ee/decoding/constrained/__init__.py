"""Constrained output: restricts the tokens of a reply to a grammar or schema."""
