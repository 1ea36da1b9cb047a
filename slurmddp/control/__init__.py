"""Actions on runs, apart from any screen."""
