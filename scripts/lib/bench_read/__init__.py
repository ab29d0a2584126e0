"""The cost of reading through a mount, beside other mounts and plain GETs."""
