"""Measures a model's exits on text and fits what predicts them, once."""
