"""Measure the cost of the stop agreement per step, beside an all-reduce of a flag in each step.

    python benchmarks/stop_agreement.py [--ranks 4] [--steps 1000] [--rounds 5] [--step-ms 1.0]
                                        [--output FILE]

All variants run in the same gloo processes, in turn, with the same step: a sleep of --step-ms in the place
of a device's work, and one small all-reduce, as data-parallel training has it. `should_stop` includes all
that a training has: signals, guard, watcher, agreement and measured pace.

Printed are medians over the rounds: the time of a step, and its ratio to the step that never asks. The wall
time of a busy machine can't show one percent, so CPU times are printed as well: of one bare call, and of the
threads behind it while the rank sleeps.
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
from slurmddp.training.stopping.stop_controller import StopController

VARIANTS = ("never asks", "should_stop", "all-reduce")


def seconds_of_step(variant, should_stop, steps, step_s):
    """Take steps of one variant and return the mean seconds of a step."""
    gradient = torch.ones(1000)
    flag = torch.zeros(1)
    dist.barrier()
    started = time.perf_counter()
    for _ in range(steps):
        if variant == "should_stop":
            should_stop()
        elif variant == "all-reduce":
            dist.all_reduce(flag)
            flag.item()
        time.sleep(step_s)
        dist.all_reduce(gradient)
    return (time.perf_counter() - started) / steps


def cpu_seconds_of_call(should_stop, calls=100_000):
    """Return the CPU seconds of one call."""
    started = time.thread_time()
    for _ in range(calls):
        should_stop()
    return (time.thread_time() - started) / calls


def core_share_of_threads(seconds=5.0):
    """Return the share of a core that the other threads take while the main thread sleeps."""
    started = time.process_time()
    time.sleep(seconds)
    return (time.process_time() - started) / seconds


def run_rank(rank, arguments, port):
    """Measure all variants as one rank; rank 0 reports."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = arguments.ranks
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timedelta(seconds=60))
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=ranks)

    info = RankInfo(environment="local", rank=rank, world_size=ranks, local_world_size=ranks)
    context = SimpleNamespace(store=store, info=info)
    stops = StopController(None)
    # The threads of gloo run before `should_stop` starts others.
    share_before = core_share_of_threads()

    def should_stop():
        return stops.should_stop(context)

    times = in_turn(
        VARIANTS,
        arguments.rounds,
        lambda variant: seconds_of_step(variant, should_stop, arguments.steps, arguments.step_ms / 1000),
    )
    dist.barrier()
    share = max(0.0, core_share_of_threads() - share_before)
    call_s = cpu_seconds_of_call(should_stop)
    dist.barrier()

    stops.close()
    if rank == 0:
        report(times, call_s, share, arguments)
    dist.barrier()
    dist.destroy_process_group()


def report(times, call_s, share, arguments):
    """Print and keep the figures.

    Args:
        times: the seconds of a step by variant, one for each round.
        call_s: the CPU seconds of one call of `should_stop`.
        share: the share of a core that its threads take.
        arguments: the command line.
    """
    rounds = f"{arguments.rounds} rounds of {arguments.steps} steps of {arguments.step_ms:g} ms"
    print(f"{arguments.ranks} gloo ranks, {rounds}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"{'variant':<12} {'ms per step':>12} {'median ratio':>13}   all ratios")
    ratios = {}
    for variant in VARIANTS:
        pairs = zip(times[variant], times["never asks"], strict=True)
        ratios[variant] = [seconds / seconds_without for seconds, seconds_without in pairs]
        all_ratios = " ".join(f"{ratio:.3f}" for ratio in ratios[variant])
        print(
            f"{variant:<12} {1000 * statistics.median(times[variant]):>12.4f} "
            f"{statistics.median(ratios[variant]):>13.4f}   {all_ratios}"
        )

    percent = 100 * (call_s / 0.001 + share)
    print(f"one bare call: {call_s * 1e9:.0f} ns; its threads: {100 * share:.3f} % of a core")
    print(f"together {percent:.3f} % of a step of 1 ms")
    results = {
        "system": platform.platform(),
        "ranks": arguments.ranks,
        "step_ms": arguments.step_ms,
        "ms_per_step": {name: 1000 * statistics.median(values) for name, values in times.items()},
        "median_ratio": {name: statistics.median(values) for name, values in ratios.items()},
        "ratios": ratios,
        "call_ns": call_s * 1e9,
        "threads_percent_of_a_core": 100 * share,
        "percent_of_a_1_ms_step": percent,
    }
    keep(arguments.output, results)


def main():
    """Start the ranks."""
    options = parser(__doc__, rounds=5)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--steps", type=int, default=1000)
    options.add_argument("--step-ms", type=float, default=1.0)
    arguments = options.parse_args()
    torch.multiprocessing.spawn(run_rank, (arguments, free_port()), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
