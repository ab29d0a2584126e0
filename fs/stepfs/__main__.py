"""`python -m stepfs`: the `stepfs` command where the console script is not on the path."""

from stepfs.cli import main

main()
