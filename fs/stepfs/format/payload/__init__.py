"""What a slice holds: the schema of a lake, and the arrays of a payload, read from its header alone."""
