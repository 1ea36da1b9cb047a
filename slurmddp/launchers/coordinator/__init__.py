"""Node 0 decides for all agents: who joins, who starts again, when the attempt ends."""
