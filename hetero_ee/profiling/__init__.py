"""Measurement of this machine at a model's shapes."""
