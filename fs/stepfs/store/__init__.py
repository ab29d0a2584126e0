"""Object stores: one small async protocol, three implementations."""
