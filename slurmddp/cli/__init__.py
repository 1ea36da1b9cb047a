"""Parse the command line, call an action of `control`, and print its result; one file for each command."""
