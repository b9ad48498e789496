"""/v1/responses, OpenAI's newer interface. Nothing is stored: each request has the whole conversation."""
