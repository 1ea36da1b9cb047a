"""Check a composed configuration before anything is started."""
