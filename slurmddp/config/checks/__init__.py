"""Checks of a composed configuration before anything is started."""
