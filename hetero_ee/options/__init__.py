"""Every option a user can set, stated once: its Python keyword, flags, setting, request fields, range and help."""
