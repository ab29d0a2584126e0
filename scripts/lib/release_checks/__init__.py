"""What `scripts/test --nightly` checks of the wheel: alone, on each Python found here, with the lowest versions."""
