"""The chat at `/`: static files, which ask for nothing but what this server answers."""
