"""What keeps a mount from hanging: watchdog, guardian, stacks, a clock that knows of suspension."""
