"""The machine around a mount: the mount table, mount points, cache directories, kernel settings."""
