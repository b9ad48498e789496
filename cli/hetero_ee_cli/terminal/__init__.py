"""Lines in and out of a terminal or a pipe."""
