"""One training job on stepfs and on its common alternatives."""
