"""Process groups of torch over transports: a user's link, shared memory, several devices."""
