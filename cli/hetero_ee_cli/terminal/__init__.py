"""Input and output on a terminal or through a pipe."""
