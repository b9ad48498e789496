"""Models as read from Hugging Face: their specs, their flat lists of blocks, and the names of their tensors."""
