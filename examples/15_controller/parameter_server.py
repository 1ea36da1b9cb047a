"""Train by a parameter server: workers compute gradients on stale weights, the controller applies them.

python parameter_server.py
slurmddp controller -n 4 parameter_server.py
slurmddp controller +cluster=cpu nodes=2 parameter_server.py
"""

import torch

from slurmddp import remote

STEPS = 60


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return points inside a circle (class 0) and outside of it (class 1)."""
    points = torch.randn(64, 2, generator=torch.Generator().manual_seed(seed))
    return points, (points.norm(dim=1, keepdim=True) > 1.2).float()


def main() -> None:
    torch.manual_seed(0)
    server = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(server.parameters(), lr=0.02)
    loss_of = torch.nn.functional.binary_cross_entropy_with_logits

    with remote.workers(3) as w:
        workers = [remote.module(server, node=node) for node in range(len(w))]

        def begin(step: int, node: int) -> torch.Tensor:
            """Let a worker compute a gradient with the newest weights; return the loss without a wait."""
            workers[node].load_state_dict(server.state_dict())
            workers[node].zero_grad()
            x, y = (part.dist_send(node=node) for part in batch(step * len(w) + node))
            loss = loss_of(workers[node](x), y)
            loss.backward()
            return loss

        losses = [begin(0, node) for node in range(len(w))]
        for step in range(1, STEPS + 1):
            for node, worker in enumerate(workers):
                # The other workers compute meanwhile.
                for parameter, computed in zip(server.parameters(), worker.parameters(), strict=True):
                    parameter.grad = computed.grad.fetch()
                optimizer.step()
                loss = losses[node]
                losses[node] = begin(step, node)

            if step % 20 == 0:
                print(f"step {step}: loss {loss.item():.3f}", flush=True)

    points, classes = batch(10_000)
    correct = (server(points) > 0) == (classes > 0)
    print(f"accuracy {correct.float().mean():.2f} with {len(w)} workers")


if __name__ == "__main__":
    main()
