"""Choose a rank's GPU or CPU and its processors, and bind the rank to them."""
