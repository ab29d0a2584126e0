"""The contents of a slice: the schema of a lake, and the arrays of a payload, read from its header alone."""
