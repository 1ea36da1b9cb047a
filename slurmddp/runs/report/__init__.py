"""Compute the goodput and the timeline of a run, and write the page that shows them."""
