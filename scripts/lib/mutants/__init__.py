"""How much the tests notice: `scripts/mutants`."""
