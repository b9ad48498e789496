"""Commands, one in each file."""
