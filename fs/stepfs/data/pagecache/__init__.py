"""The kernel's page cache: priming it, looking at it, and the threads that may wait for this very daemon."""
