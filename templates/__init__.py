"""The jinja2 templates of the scripts that slurmddp submits and of the report it writes."""
