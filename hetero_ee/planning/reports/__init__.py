"""Plans in words: explanations, reasons, alternatives and the options that make a plan again."""
