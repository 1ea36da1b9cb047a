"""What an agent sees of its ranks: standstills and who causes them, stacks, and ranks that are slow."""
