"""The machines that work for a run: `opening` brings them, `needs` says what each of them must have."""
