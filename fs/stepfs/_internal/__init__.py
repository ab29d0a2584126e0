"""What every room uses and no program outside imports: clocks, threads, options, limits, signals."""
