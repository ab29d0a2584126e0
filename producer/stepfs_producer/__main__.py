"""`python -m stepfs_producer`: the `stepfs-produce` command where the console script is not on the path."""

from stepfs_producer.cli import main

main()
