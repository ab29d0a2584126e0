"""The machines that work for a run: `opening` brings them, `needs` checks each of them."""
