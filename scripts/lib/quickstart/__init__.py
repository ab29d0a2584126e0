"""From an empty directory to a training loop that reads committed steps, with a table of checks."""
