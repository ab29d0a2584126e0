"""One module per peer. Each is imported in that peer's own environment, and imports its library inside functions."""
