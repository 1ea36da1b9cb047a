"""Walk through the controller; each line may also be typed into an interpreter or a notebook.

python walkthrough.py
salloc -N 2 -n 4 python -i walkthrough.py
"""

import torch

from slurmddp import remote

w = remote.workers(2)

# Create a tensor on a worker, or send it to the worker. A result is on the worker of its operands.
x = remote.full((2, 3), 4.0, node=1)
y = torch.ones(2, 3).dist_send(node=1)
z = x + y
print("z:", z)
print("its data:", z.fetch().tolist())

# Operands on two workers are refused; the message names the remedy.
with remote.node(0):
    a = torch.zeros(2, 3)
try:
    a + z
except Exception as error:
    print("mixed:", str(error).partition(". ")[0])

# Collectives exchange data between workers.
w.all_reduce([a, z], "mean")
print("mean on node 0:", a[0].tolist())

# Autograd and optimizers work as in a single process.
model = remote.module(torch.nn.Linear(3, 1, bias=False), node=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    loss = ((model(y) - 6) ** 2).mean()
    loss.backward()
    optimizer.step()
print(f"sum of weights: {model.weight.sum().item():.2f}")

# An error of a worker is raised by the next fetch; other tensors stay usable.
wrong = y[remote.tensor([7], node=1)]
try:
    wrong.fetch()
except remote.RemoteError as error:
    print("error:", error.message.partition(": ")[2].partition(" (")[0])
print("goes on:", y.sum().item())
