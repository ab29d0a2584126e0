"""One module per group of rows in the table."""
