"""How the replicas of a model agree."""
