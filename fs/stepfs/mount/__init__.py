"""The kernel's side: the only room that imports pyfuse3. `fs/SEMANTICS.md` describes its promises."""
