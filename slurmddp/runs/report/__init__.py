"""What the time of a run went into, and the page that shows it."""
