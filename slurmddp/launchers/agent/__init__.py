"""The agent of a node: starts its ranks, watches them, and obeys the coordinator."""
