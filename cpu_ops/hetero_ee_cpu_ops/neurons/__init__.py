"""Products and FFNs that leave out neurons."""
