"""What writing to a lake costs and yields."""
