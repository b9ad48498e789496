"""Tool calls: the tools in requests, the formats in which templates write calls, and parsing of replies."""
