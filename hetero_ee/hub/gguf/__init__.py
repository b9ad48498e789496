"""Read and check the header of GGUF files, and translate it to Hugging Face's files."""
