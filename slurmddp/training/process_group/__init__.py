"""Let the ranks of a launch find each other and form a process group."""
