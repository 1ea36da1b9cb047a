"""The default model, data set and learning rates."""
