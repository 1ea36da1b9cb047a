"""Choose and take the device of a rank: its GPU or CPU, and its processors."""
