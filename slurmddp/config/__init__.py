"""From the command line and YAML files to a `Job`; no other room knows Hydra."""
