"""Start, show, stop, resume and remove runs without printing, for the command line and for Python."""
