"""From a Hugging Face id or a path to a model's files that may be opened."""
