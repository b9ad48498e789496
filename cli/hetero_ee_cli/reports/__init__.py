"""Reports of runs, as text, table or JSON."""
