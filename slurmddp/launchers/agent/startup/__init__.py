"""Hold `sitecustomize`: this folder stands first in PYTHONPATH until a person's program has started."""
