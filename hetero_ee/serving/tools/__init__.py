"""Tool calls: what a request offers, how a template writes calls, and how a reply is parsed."""
