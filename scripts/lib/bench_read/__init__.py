"""What reading through a mount costs, beside other mounts and plain GETs."""
