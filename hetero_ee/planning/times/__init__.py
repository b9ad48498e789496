"""Expected seconds and bytes of a plan, from a measured profile."""
