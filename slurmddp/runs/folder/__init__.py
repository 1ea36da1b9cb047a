"""The run folder: its layout, its events, its code, its lock."""
