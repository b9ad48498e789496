"""Between text and tokens: tokenizer, chat templates, text as it streams."""
