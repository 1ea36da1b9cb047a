"""One rank: joins the process group, adds its rank to a sum over all ranks, prints its settings, leaves."""

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist

from slurmddp.environments.detect import detect
from slurmddp.training.process_group import setup

warnings.simplefilter("error")
before = dict(os.environ)
threads = torch.get_num_threads()
info = detect(os.environ)
context = setup.start(info, rendezvous_timeout_s=240)
total = torch.tensor([float(info.rank + 1)], device=context.device)
if context.backend is not None:
    dist.all_reduce(total)
place = {
    "rank": info.rank,
    "environment": info.environment,
    "backend": context.backend,
    "device": str(context.device),
    "total": total.item(),
    "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    "threads": torch.get_num_threads(),
    "threads_before": threads,
    "omp": os.environ.get("OMP_NUM_THREADS"),
}
setup.finish(context)
setup.finish(context)
place["undone"] = (
    dict(os.environ) == before and torch.get_num_threads() == threads and not dist.is_initialized()
)
sys.stdout.write(json.dumps(place) + "\n")
