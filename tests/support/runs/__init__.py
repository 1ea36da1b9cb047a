"""Run folders, agents and coordinators whose ranks need no torch."""
