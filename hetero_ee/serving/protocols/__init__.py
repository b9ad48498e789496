"""Requests and answers of each path, in the formats of OpenAI, Anthropic, llama-server and vLLM."""
