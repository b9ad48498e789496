"""Exit policies: decide where a token exits and is emitted without the remaining layers."""
