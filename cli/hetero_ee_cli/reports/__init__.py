"""What a run did, as text, table or JSON."""
