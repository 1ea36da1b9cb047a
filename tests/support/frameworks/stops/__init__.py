"""Scripts of frameworks that save when they are asked to stop, each in its framework's own way."""
