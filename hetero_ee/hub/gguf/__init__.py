"""GGUF files: their header, checked, and its translation to Hugging Face's files."""
