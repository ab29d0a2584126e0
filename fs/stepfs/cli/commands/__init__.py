"""One command a file; `stepfs.cli.app` lists them."""
