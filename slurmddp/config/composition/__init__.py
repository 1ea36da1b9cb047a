"""Compose the settings of a command line and the files of a project to one configuration, by Hydra."""
