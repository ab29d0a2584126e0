"""What `scripts/release` does: the files of a release, equal byte for byte wherever and whenever they are built."""
