"""How a run stands: its state, its logs, its figures."""
