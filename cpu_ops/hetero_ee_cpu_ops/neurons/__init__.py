"""Products and FFNs that skip inactive neurons."""
