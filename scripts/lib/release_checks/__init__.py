"""What `scripts/test --slow` checks of the wheel: that it works alone, without the source tree and without torch."""
