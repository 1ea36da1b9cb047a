"""Send messages between agents, over authenticated connections to node 0."""
