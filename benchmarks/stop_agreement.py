"""What agreeing on a stop costs per training step, beside the usual way: an all-reduce of a flag each step.

    python benchmarks/stop_agreement.py [--ranks 4] [--steps 1000] [--rounds 5] [--step-ms 1.0]

All variants run in the same gloo processes, in turns, with the same step: --step-ms of sleep (as when a
device computes) and one small all-reduce as data-parallel training has it. Printed are medians over the
rounds: time per step, and its ratio to the step that never asks; and the CPU time of one bare `tick()`.
"""

import argparse
import os
import socket
import statistics
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from slurmddp.training.stop import StopAgreement, StopSignals

VARIANTS = ("never asks", "agreement", "all-reduce")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(variant, agreement, steps, step_s):
    """Return seconds per step."""
    gradient, flag = torch.ones(1000), torch.zeros(1)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        if variant == "agreement":
            agreement.tick()
        elif variant == "all-reduce":
            dist.all_reduce(flag)
            flag.item()
        time.sleep(step_s)
        dist.all_reduce(gradient)
    return (time.perf_counter() - begin) / steps


def bare_tick(agreement, calls=100_000):
    begin = time.thread_time()
    for _ in range(calls):
        agreement.tick()
    return (time.thread_time() - begin) / calls


def rank_main(rank, options, port):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, options.ranks, rank == 0, timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=options.ranks
    )
    times = {variant: [] for variant in VARIANTS}
    with StopSignals() as signals, StopAgreement(store, rank, options.ranks, signals=signals) as agreement:
        train("agreement", agreement, 50, 0)
        for number in range(options.rounds):
            for variant in VARIANTS[number % 3 :] + VARIANTS[: number % 3]:
                times[variant].append(train(variant, agreement, options.steps, options.step_ms / 1000))
        tick_s = bare_tick(agreement)
        dist.barrier()
    if rank == 0:
        report(times, tick_s, options)
    dist.barrier()
    dist.destroy_process_group()


def report(times, tick_s, options):
    sizes = f"{options.rounds} rounds of {options.steps} steps of {options.step_ms:g} ms"
    print(f"{options.ranks} gloo ranks, {sizes}, {os.cpu_count()} cores")
    print(f"{'variant':<12} {'ms per step':>12} {'median ratio':>13}   all ratios")
    for variant in VARIANTS:
        ratios = [mine / base for mine, base in zip(times[variant], times["never asks"], strict=True)]
        shown = " ".join(f"{ratio:.3f}" for ratio in ratios)
        print(
            f"{variant:<12} {1000 * statistics.median(times[variant]):>12.4f} "
            f"{statistics.median(ratios):>13.4f}   {shown}"
        )
    share = 100 * tick_s * 1000
    print(f"one bare tick(): {tick_s * 1e9:.0f} ns, that is {share:.4f} % of a step of 1 ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--step-ms", type=float, default=1.0)
    options = parser.parse_args()
    torch.multiprocessing.spawn(rank_main, (options, free_port()), nprocs=options.ranks)


if __name__ == "__main__":
    main()
