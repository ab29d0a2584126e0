"""A lake in a directory (file://)."""
