"""Train with plain torch.distributed and a checkpoint per epoch, without code of slurmddp.

torchrun --nproc-per-node=2 train.py --out checkpoints
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def save(file: Path, **state: object) -> None:
    """Write a checkpoint; readers see it whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.with_suffix(".tmp"))
    file.with_suffix(".tmp").rename(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path("checkpoints"))
    parser.add_argument("--resume", action="store_true", help="begin with the checkpoint in --out")
    options = parser.parse_args()

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")

    torch.manual_seed(0)
    model = build_model().to(device)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    x = torch.linspace(-1, 1, 512)[:, None]
    data = TensorDataset(x, torch.sin(3 * x))
    sampler = DistributedSampler(data, seed=0)
    loader = DataLoader(data, batch_size=16, sampler=sampler)

    first = 0
    newest = options.out / "newest.pt"
    if options.resume:
        state = torch.load(newest, map_location=device, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["epochs"]

    for epoch in range(first, options.epochs):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            loss = mse_loss(parallel(inputs.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        if dist.get_rank() == 0:
            save(newest, model=model.state_dict(), optimizer=optimizer.state_dict(), epochs=epoch + 1)
            print(f"epoch {epoch}: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
