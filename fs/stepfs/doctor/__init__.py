"""Why does it not work here? Checks of the machine, the mounts on it and a lake, each with what to do about it."""
