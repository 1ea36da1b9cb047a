"""Jobs of ranks that call the all-reduce algorithms."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from slurmddp.collectives import ALGORITHMS, GroupLink, all_reduce
from slurmddp.collectives.hook import ddp_hook
from slurmddp.training.distributon import Distributon


def sums() -> dict[str, list[list[float]]]:
    """Return the sums of all algorithms, of tensors of one, two and seven elements."""
    with Distributon() as d:
        d.launch()
        link = GroupLink()
        tensors = [torch.full((length,), float(value)) for length, value in ((1, 1), (2, 2), (7, 3))]
        return {
            name: [all_reduce(tensor, link, algorithm=name).tolist() for tensor in tensors]
            for name in ALGORITHMS
        }


def trained(algorithms: list[str | None]) -> list[list[float]]:
    """Return the weights of a model after three steps of DDP with each algorithm; None: DDP's own."""
    found = []
    with Distributon(seed=0) as d:
        d.launch()
        for algorithm in algorithms:
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Tanh(), torch.nn.Linear(9, 3))
            model = DistributedDataParallel(net, bucket_cap_mb=0.0002)
            if algorithm is not None:
                model.register_comm_hook(GroupLink(), ddp_hook(algorithm))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
            generator = torch.Generator().manual_seed(d.rank)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(4, 7, generator=generator)).square().mean().backward()
                optimizer.step()
            found.append(torch.nn.utils.parameters_to_vector(net.parameters()).tolist())
    return found
