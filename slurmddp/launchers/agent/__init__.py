"""Run one agent on each node, which starts the node's ranks, watches them, and obeys the coordinator."""
