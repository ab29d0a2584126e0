"""Reports of commands about plans, and the plan of `stepfs-produce text`: one file per command."""
