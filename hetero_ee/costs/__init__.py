"""What blocks of a model cost in bytes, products and state."""
