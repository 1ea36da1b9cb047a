"""From the words of a command line and the files of a project to one configuration, by Hydra."""
