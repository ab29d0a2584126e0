"""What the mount shows, as functions of a log's state: no kernel, no I/O, no clock. `stepfs ls` uses the same rooms."""
