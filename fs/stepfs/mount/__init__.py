"""The kernel's side: pyfuse3 lives here and nowhere else. `fs/SEMANTICS.md` is the prose of this room."""
