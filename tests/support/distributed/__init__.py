"""Ranks with torch: the functions that they run, and the programs that start them."""
