"""A server of the Model Context Protocol, through which coding agents plan, start, watch and stop runs."""
