"""The options of the command line, each stated once."""
