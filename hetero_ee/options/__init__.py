"""Declare every option that a user can set: its Python keyword, flags, setting, request fields, range and help."""
