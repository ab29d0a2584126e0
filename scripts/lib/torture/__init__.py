"""Real processes killed at random on a real store, and an audit of every byte."""
