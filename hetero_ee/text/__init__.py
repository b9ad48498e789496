"""Convert text to tokens and back: tokenizers, chat templates, text streams."""
