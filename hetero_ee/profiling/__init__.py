"""Measures this machine at a model's shapes, once."""
