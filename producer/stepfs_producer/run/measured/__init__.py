"""What a running plan measures of itself: where workers go, how many it wants, and what it waits for."""
