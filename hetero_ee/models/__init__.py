"""Read models from Hugging Face's files: their specs, their flat lists of blocks, and the names of their tensors."""
