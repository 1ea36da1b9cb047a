"""Train over MPI: mpiexec -n 2 python over_mpi.py"""

import sys

import torch
from torch import nn

from slurmddp import Distributon

backend = sys.argv[1] if len(sys.argv) > 1 else "mpi.Mpi"

with Distributon(backend=backend, seed=0) as d:
    d.launch()
    model = d.setup_model(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = d.setup_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(d.rank))
    for step in range(1, 101):
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        d.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

        if step % 25 == 0:
            mean = d.all_reduce(loss.detach())
            d.print(f"step {step}: loss {mean.item():.6f} on {d.world_size} ranks over {backend}")
