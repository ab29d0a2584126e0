"""Following the lake: how new steps are learned of, how often, how waiting readers wake, and the reader's own group."""
