"""How long a training loop waits for its data."""
