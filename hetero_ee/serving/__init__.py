"""An HTTP server for one engine, with OpenAI's and Anthropic's requests, and llama-server's and vLLM's monitoring.

Functions that read a request raise a RequestError if it asks for something impossible. ClientDisconnect means that the
client has closed the connection. app.py turns errors into answers.
"""
