"""How ranks stop together at one step, in time."""
