"""The command line: each command parses, calls one library function and prints.

Functions raise a UsageError for a value, a file or a combination of options that can't be used; app.py reports it.
"""
