"""Reading a whole lake back against its log, for `stepfs verify` and for audits in tests."""
