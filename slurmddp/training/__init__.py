"""The code that runs in the ranks. Modules of this package may import torch."""
