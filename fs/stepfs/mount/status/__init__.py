"""The published state of a mount: status documents, metrics, its record in the fleet view."""
