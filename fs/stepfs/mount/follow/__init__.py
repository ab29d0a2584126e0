"""How a mount learns of new steps, at what rate, and whom it wakes when they are there."""
