"""Check nodes and links before an attempt trains."""
