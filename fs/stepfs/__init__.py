"""stepfs: transactional global training batches in object storage, read as files."""

__version__ = "0.1.0"
