"""Committing steps exactly once: `producer` takes appends, `loop` commits them, `backpressure` holds them back."""
