"""The root process of one mount: it owns device, state and socket, and starts every daemon."""
