"""The goodput of a run, its timeline, and the page that shows them."""
