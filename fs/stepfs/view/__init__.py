"""The contents of a mount, as functions of a log's state: no kernel, no I/O, no clock. `stepfs ls` uses them, too."""
