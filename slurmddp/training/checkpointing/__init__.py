"""Save and load the state of a training on all ranks together."""
