"""The code of the ranks: training API, default trainer, checkpoints, data; it may import torch."""
