"""stepfs: transactional global training batches in object storage, read as files."""
