"""Build torch's process groups over transports: a user's link, shared memory, several devices."""
