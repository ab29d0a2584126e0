"""How much memory this process may use, and giving it back under pressure."""
