"""A script that starts its own ranks, two on each node; slurmddp starts it once per node."""

import os

import torch.multiprocessing as mp
from plain_torch import train

EACH = 2


def main(local_rank: int, node_rank: int, nodes: int) -> None:
    """Train as one of the two ranks of a node."""
    train(node_rank * EACH + local_rank, local_rank, nodes * EACH)


if __name__ == "__main__":
    mp.spawn(main, args=(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])), nprocs=EACH)
