"""How much the tests notice: `scripts/mutation`."""
