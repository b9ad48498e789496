"""Texts that keep to a grammar: what may follow at each place, and what must."""
