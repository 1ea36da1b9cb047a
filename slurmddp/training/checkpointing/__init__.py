"""How ranks save and load the state of a training."""
