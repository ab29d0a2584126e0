"""The log: commits folded into a state, followed, and shortened by snapshots."""
