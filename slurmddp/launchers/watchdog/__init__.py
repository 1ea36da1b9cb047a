"""Find ranks that hang or are slower than the others, and where they are in the code."""
