"""What a mount says of itself: status documents, metrics, its record in the fleet view."""
