"""Faults on purpose: a training is disturbed at random moments, and must end with the undisturbed weights."""
