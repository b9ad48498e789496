"""Calibration: measures a model's early exits on text, and fits the maps and predictors for them."""
