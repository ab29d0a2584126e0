"""Protection against hanging mounts: watchdog, guardian, stacks, a clock for suspended processes."""
