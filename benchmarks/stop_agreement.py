"""Measure the cost of the stop agreement per step, beside an all-reduce of a flag in each step.

    python benchmarks/stop_agreement.py [--ranks 4] [--steps 1000] [--rounds 5] [--step-ms 1.0]
                                        [--output FILE]

All variants run in the same gloo processes, in turns, with the same step: --step-ms of sleep (as when a
device computes) and one small all-reduce as data-parallel training has it. "should_stop" is all that a
training has: signals, guard, watcher, agreement, measured pace. Printed are medians over the rounds: time per
step, and its ratio to the step that never asks. Wall time on a busy machine says little about one percent,
so the CPU time is told as well: of one bare call, and of the threads behind it while the rank sleeps.
"""

import os
import platform
import statistics
import time
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
from record import free_port, in_turn, keep, parser

from slurmddp.environments.rank_info import RankInfo
from slurmddp.training.stopping.controller import StopController

VARIANTS = ("never asks", "should_stop", "all-reduce")


def train(variant, should_stop, steps, step_s):
    """Return seconds per step."""
    gradient, flag = torch.ones(1000), torch.zeros(1)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        if variant == "should_stop":
            should_stop()
        elif variant == "all-reduce":
            dist.all_reduce(flag)
            flag.item()
        time.sleep(step_s)
        dist.all_reduce(gradient)
    return (time.perf_counter() - begin) / steps


def bare_call(should_stop, calls=100_000):
    """Return the CPU seconds of one call."""
    begin = time.thread_time()
    for _ in range(calls):
        should_stop()
    return (time.thread_time() - begin) / calls


def threads_share(seconds=5.0):
    """Return the share of a core that the other threads take while the main thread sleeps."""
    begin = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - begin) / seconds


def rank_main(rank, options, port):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, options.ranks, rank == 0, timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=options.ranks
    )
    info = RankInfo(environment="local", rank=rank, world_size=options.ranks, local_world_size=options.ranks)
    context, stops = SimpleNamespace(store=store, info=info), StopController(None)
    idle = threads_share()

    def should_stop():
        return stops.should_stop(context)

    times = in_turn(
        VARIANTS,
        options.rounds,
        lambda variant: train(variant, should_stop, options.steps, options.step_ms / 1000),
    )
    dist.barrier()
    share = max(0.0, threads_share() - idle)
    call_s = bare_call(should_stop)
    dist.barrier()
    stops.close()
    if rank == 0:
        report(times, call_s, share, options)
    dist.barrier()
    dist.destroy_process_group()


def report(times, call_s, share, options):
    sizes = f"{options.rounds} rounds of {options.steps} steps of {options.step_ms:g} ms"
    print(f"{options.ranks} gloo ranks, {sizes}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'variant':<12} {'ms per step':>12} {'median ratio':>13}   all ratios")
    ratios = {
        variant: [mine / base for mine, base in zip(times[variant], times["never asks"], strict=True)]
        for variant in VARIANTS
    }
    for variant in VARIANTS:
        shown = " ".join(f"{ratio:.3f}" for ratio in ratios[variant])
        print(
            f"{variant:<12} {1000 * statistics.median(times[variant]):>12.4f} "
            f"{statistics.median(ratios[variant]):>13.4f}   {shown}"
        )
    cost = 100 * (call_s / 0.001 + share)
    print(f"one bare call: {call_s * 1e9:.0f} ns; its threads: {100 * share:.3f} % of a core")
    print(f"together {cost:.3f} % of a step of 1 ms")
    result = {
        "system": platform.platform(),
        "ranks": options.ranks,
        "step_ms": options.step_ms,
        "ms_per_step": {name: 1000 * statistics.median(values) for name, values in times.items()},
        "median_ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "ratios": ratios,
        "call_ns": call_s * 1e9,
        "threads_percent_of_a_core": 100 * share,
        "percent_of_a_1_ms_step": cost,
    }
    keep(options.output, result)


def main():
    made = parser(__doc__, rounds=5)
    made.add_argument("--ranks", type=int, default=4)
    made.add_argument("--steps", type=int, default=1000)
    made.add_argument("--step-ms", type=float, default=1.0)
    options = made.parse_args()
    torch.multiprocessing.spawn(rank_main, (options, free_port()), nprocs=options.ranks)


if __name__ == "__main__":
    main()
