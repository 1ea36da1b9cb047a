"""The settings of a job: the schema, its checks and what follows from it, without Hydra and without files."""
