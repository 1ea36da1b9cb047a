"""How many samples one optimizer step has, whatever the number of ranks that share them.

The learning rate and its schedule fit one size of the step. A run that goes on with more or fewer ranks
keeps that size: each rank takes more or fewer batches per step, or smaller batches where that is needed.
"""

from __future__ import annotations

from slurmddp.errors import MismatchError
from slurmddp.spec import GlobalBatch


def share(samples: int, world_size: int, most: int) -> tuple[int, int]:
    """Return (samples per batch, batches per step) of each rank; `most` is what it can take at once.

    Raises MismatchError, which names the world sizes that work, where ranks can't share evenly.
    """
    batch = GlobalBatch(samples)
    found = batch.share(world_size, most)
    if found is None:
        raise MismatchError(
            f"A step of {samples} samples can't be shared evenly by {world_size} ranks.",
            hint=f"World sizes that work: {batch.world_sizes(world_size)}.",
        )
    return found
