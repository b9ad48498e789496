"""What a model is: its numbers, its flat list of blocks, and where Hugging Face keeps each tensor."""
