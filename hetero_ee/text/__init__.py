"""Text and tokens: tokenizers, chat templates, text streams."""
