"""From logits to tokens: sampling, stopping, and the full-depth loop."""
