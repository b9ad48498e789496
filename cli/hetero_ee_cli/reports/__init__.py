"""Reports on runs, as text, tables or JSON."""
