"""An HTTP server for one engine: OpenAI's and Anthropic's ways to ask, llama-server's and vLLM's names to watch it."""
