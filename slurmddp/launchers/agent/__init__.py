"""Run the agent: one process per node, which starts and watches ranks by the coordinator's orders."""
