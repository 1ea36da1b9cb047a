"""Hold `sitecustomize`: this folder is first in PYTHONPATH until a person's program has started."""
