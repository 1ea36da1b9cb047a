"""Provide the default model, data set and learning rate schedules."""
