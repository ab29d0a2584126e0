"""Reading a whole lake back against what its log says, for `stepfs verify` and for audits in tests."""
