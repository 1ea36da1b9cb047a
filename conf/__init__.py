"""The configuration groups that slurmddp ships; a project's own `conf/` is searched before them."""
