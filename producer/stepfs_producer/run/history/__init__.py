"""Back from the steps of a lake: to their records and texts, from a record to its steps, and to the same steps again."""
