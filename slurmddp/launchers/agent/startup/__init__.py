"""The folder that stands first in the PYTHONPATH of a person's script or module, until Python has started."""
