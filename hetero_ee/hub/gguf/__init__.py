"""GGUF files: their header, checked, and what it says as Hugging Face's files would."""
