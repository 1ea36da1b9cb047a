"""Find ranks that hang or are slower than the other ranks, and where they are in the code."""
