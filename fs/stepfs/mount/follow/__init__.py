"""Following the lake: how a mount learns of new steps, how often it looks, and how it wakes waiting readers."""
