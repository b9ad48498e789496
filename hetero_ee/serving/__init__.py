"""An HTTP server for one engine: OpenAI's and Anthropic's ways to ask, llama-server's and vLLM's names to watch it.

Functions that read a request raise a RequestError if it asks for something impossible; ClientDisconnect means that the
client is gone. app.py turns errors into answers.
"""
