"""The command line. Each command parses its options, calls one library function and prints the result.

Functions raise a UsageError for a value, a file or a combination of options that can't be used. app.py reports it.
"""
