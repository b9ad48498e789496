"""Find a model's files by a path or a Hugging Face id, download them, and check them before they are opened."""
