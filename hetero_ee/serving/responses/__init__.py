"""/v1/responses, OpenAI's newer interface, without memory: each request brings all that was said."""
