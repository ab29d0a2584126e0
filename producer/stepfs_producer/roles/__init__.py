"""What workers of a planned run do, as plain functions: `loader` reads and transforms, `constructor` makes payloads."""
