"""Read and write run folders, the plain-text records that the login nodes and the compute nodes share."""
