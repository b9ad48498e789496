"""Sources of drafts that don't need the model's layers: draft heads and n-grams."""
