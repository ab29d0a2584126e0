"""The files of a corpus: found, listed, and read as records in the order of an epoch."""
