"""Check the nodes and the network between them before an attempt trains."""
