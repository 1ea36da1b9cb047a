"""The names by which a data set tells the trainer what it is and what it can do."""

from __future__ import annotations

ATTRIBUTES = {
    "__len__": "map-style data: the number of samples",
    "__getitem__": "map-style data: the sample of an index, a pair (inputs, targets)",
    "__getitems__": "map-style data: a list of samples at once",
    "__iter__": "iterable data (torch's IterableDataset): all samples of an epoch",
    "set_share": "iterable data: called with (part, parts) in every reader before each epoch",
    "set_epoch": "iterable data: called with the epoch in every reader before each epoch",
    "state_dict": "iterable data: how far it is",
    "load_state_dict": "iterable data: resume from there",
    "sample_weights": "map-style data: one number per sample; samples are drawn in proportion to it",
    "deterministic": "true: reading a sample draws no random numbers",
    "heldout": "a method that returns the map-style data to evaluate on",
    "tokens_per_sample": "counts tokens instead of samples in rates",
    "encode": "with `decode`, and `generate` of the model: text to write at the end",
    "decode": "see `encode`",
}
