"""The chat page at `/`: static files that load nothing from other servers."""
