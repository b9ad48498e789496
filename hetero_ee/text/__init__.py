"""Between text and tokens: tokenizer, chat templates, streaming text."""
