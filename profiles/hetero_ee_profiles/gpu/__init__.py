"""GPUs: inventory, and measurement of their operations."""
