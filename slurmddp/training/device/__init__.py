"""What a rank computes on: its GPU or CPU, and its processors."""
