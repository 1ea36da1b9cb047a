"""Read the limits of a site's partitions, nodes and accounts, and compare jobs with them."""
