"""The limits of a site: partitions, nodes and accounts, and the comparison of a job with them."""
