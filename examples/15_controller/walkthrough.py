"""A walk through the controller, for `python -i`: each line may be typed into an interpreter or a notebook.

python walkthrough.py
salloc -N 2 -n 4 python -i walkthrough.py
"""

import torch

from slurmddp import remote

w = remote.workers(2)

# Tensors are made on a worker, or sent there. Results are where their operands are.
x = remote.full((2, 3), 4.0, node=1)
y = torch.ones(2, 3).dist_send(node=1)
z = x + y
print("z:", z)
print("its data:", z.fetch().tolist())

# Operands in two places are refused, with the remedy.
with remote.node(0):
    a = torch.zeros(2, 3)
try:
    a + z
except Exception as error:
    print("mixed:", str(error).partition(". ")[0])

# Workers talk to each other.
w.all_reduce([a, z], "mean")
print("mean on node 0:", a[0].tolist())

# Autograd and optimizers work as in one process.
model = remote.module(torch.nn.Linear(3, 1, bias=False), node=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(100):
    optimizer.zero_grad()
    loss = ((model(y) - 6) ** 2).mean()
    loss.backward()
    optimizer.step()
print(f"sum of weights: {model.weight.sum().item():.2f}")

# An error of a worker comes with the next copy, and everything else continues.
wrong = y[remote.tensor([7], node=1)]
try:
    wrong.fetch()
except remote.RemoteError as error:
    print("error:", error.message.partition(": ")[2].partition(" (")[0])
print("goes on:", y.sum().item())
