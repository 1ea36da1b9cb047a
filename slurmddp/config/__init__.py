"""Build a `Job` from the command line and YAML files; no other room imports Hydra."""
