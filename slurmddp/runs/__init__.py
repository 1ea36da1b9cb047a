"""The run folder: the plain-text record that the login side and the node side share."""
