"""Run jobs, scripts, functions and programs on this machine or in an allocation."""
