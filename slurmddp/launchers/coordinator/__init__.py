"""Decide on node 0 for the agents of all nodes when ranks start, restart and end."""
