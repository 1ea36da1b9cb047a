"""Process groups of torch over transports: a link of one's own, shared memory, several devices."""
