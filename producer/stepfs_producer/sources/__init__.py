"""Which bytes a corpus consists of, in an order that every process agrees on: `listing`."""
