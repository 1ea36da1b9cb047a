"""The line between the agents of an attempt: one connection, what outlasts it, its two ends."""
