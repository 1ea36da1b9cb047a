"""Process groups of torch over transports: a link, shared memory, several devices."""
