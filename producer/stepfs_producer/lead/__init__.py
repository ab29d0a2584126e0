"""`max_lead`: how far a producer may run ahead of the slowest consumer group, asked seldom."""
