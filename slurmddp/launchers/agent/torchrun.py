"""Run the ranks of a node under torchrun, for programs that need torch elastic.

The command is `slurmddp run --launcher torchrun`.

The agent forks one process, which becomes the node's torchrun (`start`). torchrun starts this module once per
rank (`main`), and the program takes its place, as it does without torchrun. All torchruns of a worker group
meet at the address that node 0's agent has found.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, NoReturn

from slurmddp.environments.detect import detect
from slurmddp.environments.names import (
    CHANNEL_VARIABLE,
    HEARTBEAT_VARIABLE,
    IMPORTS_VARIABLE,
    LAUNCH_ID_VARIABLE,
    MEMORY_VARIABLE,
    RESTART_COUNT_VARIABLE,
)
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, EXIT_STOPPED, HINT
from slurmddp.host import process
from slurmddp.host.heartbeat_page import HeartbeatPage, ReportedError
from slurmddp.host.streams import tell
from slurmddp.launchers.agent import user_program, worker
from slurmddp.launchers.agent.preload import enter_project
from slurmddp.launchers.coordinator.restart_policy import Rules, rules_of
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.failure import describe, is_consequence
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.program_hints import hint_after
from slurmddp.runs.folder.run_context import RunContext

ENTRY = f"{__name__}:start"
_CAUSE_S = 0.5
"""Seconds that a rank which lost a peer leaves to that peer's node to record the cause."""
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
"""The signals that torchrun forwards. By default it omits SIGUSR2, SLURM's warning."""
_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""`1` gives each restart a new store. In the shared store, ranks find the addresses of dead ranks."""
_OF_A_FORKED_RANK = (HEARTBEAT_VARIABLE, CHANNEL_VARIABLE, MEMORY_VARIABLE, IMPORTS_VARIABLE)
"""Variables with descriptors of this process, which torchrun closes in its workers."""


def start(run_dir: str) -> int:
    """Run this process as the node's torchrun; return its exit code: 75 after a signal to stop."""
    folder, node = RunFolder(run_dir), detect(os.environ)
    launcher: Any = importlib.import_module("torch.distributed.run")
    errors: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    api: Any = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    page = HeartbeatPage.attach(os.environ)
    for name in _OF_A_FORKED_RANK:
        os.environ.pop(name, None)
    os.environ[LAUNCH_ID_VARIABLE] = node.launch_id
    os.environ.setdefault(_OWN_STORE, "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun, without its warning
    words = arguments(folder.config(), node, os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])
    known = launcher.get_args_parser().format_help()
    if "--signals-to-handle" not in known:
        # An older torchrun forwards SIGTERM, but would die of SIGUSR2 and leave its workers behind.
        signal.signal(signal.SIGUSR2, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    words = [word for word in words if word.partition("=")[0] in known or not word.startswith("--")]
    api._terminate_process_handler = partial(_forward, api._terminate_process_handler)
    local: Any = importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    ranks = rules_of(folder.config(), node.nodes).ranks_per_node
    pages = [HeartbeatPage.create() for _ in range(ranks)]
    _count_restarts(local.LocalElasticAgent)
    _stop_with_a_rank(local.LocalElasticAgent, api.SignalException)
    _record_restarts(local.LocalElasticAgent, folder)
    numbers = ",".join(str(page.descriptor) for page in pages)
    try:
        launcher.run(launcher.parse_args([*words, "-m", __name__, run_dir, str(os.getpid()), numbers]))
    except api.SignalException:
        return EXIT_STOPPED
    except errors.ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = _report(folder, rank, failure, page)
        return pages[int(failure.local_rank)].explained(code)
    is_stopped = any(page.read().exit_code == EXIT_STOPPED for page in pages)
    return EXIT_STOPPED if is_stopped else EXIT_FINISHED


def _forward(forward: Callable[[int, Any], None], number: int, frame: Any) -> None:
    """Let torchrun forward a signal; a later SIGUSR2 must not interrupt it while the ranks save."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    forward(_for_ranks(number), frame)


def _for_ranks(number: int) -> int:
    """Return the signal that the ranks get: SIGTERM in place of SIGUSR2 if one does not handle that."""
    handles_all = all(process.handles(pid, signal.SIGUSR2) for pid in _ranks())
    return signal.SIGTERM if number == signal.SIGUSR2 and not handles_all else number


def _ranks() -> list[int]:
    """Return the pids of the ranks of this torchrun, which starts each in a session of its own."""
    stats = process.all_stats()
    own = os.getpid()
    return [pid for pid, fields in stats.items() if int(fields[1]) == own and int(fields[3]) == pid]


def arguments(config: dict[str, Any], node: RankInfo, address: str, port: str) -> list[str]:
    """Return the options of torchrun on one node.

    Args:
        config: the run's configuration.
        node: the place of the node's agent in the worker group.
        address: the address at which all torchruns meet.
        port: a port that is free there.
    """
    rules = rules_of(config, node.nodes)
    policy = config.get("policy") or {}
    rendezvous = {
        "is_host": str(node.node_rank == 0).lower(),
        "join_timeout": int(rules.join_timeout_s),
        "read_timeout": int(rules.join_timeout_s),
    }
    return [
        f"--nnodes={node.nodes}",
        f"--nproc-per-node={rules.ranks_per_node}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={f'[{address}]' if ':' in address else address}:{port}",
        f"--rdzv-id={node.launch_id}",
        "--rdzv-conf=" + ",".join(f"{name}={value}" for name, value in rendezvous.items()),
        # torchrun's default is the machine's name, which may mean loopback there.
        f"--local-addr={node.hosts[node.node_rank] if node.node_rank else address}",
        f"--max-restarts={_max_restarts(rules)}",
        f"--signals-to-handle={_SIGNALS}",
        f"--shutdown-timeout={int(policy.get('signal_lead_s') or 120)}",  # as long as a save may take
    ]


def _max_restarts(rules: Rules) -> int:
    return rules.max_restarts if rules.is_resumable else 0


def _count_restarts(agent_class: Any) -> None:
    """Let the ranks of all nodes find the same number of restarts.

    torchrun's own number is the failures on its node: where the ranks start again because another node meets
    again, it stays. But no node starts ranks before all nodes have met, so all nodes start as often.
    """
    start = agent_class._start_workers
    restart_count = RunContext.read(os.environ).restart_count - 1

    @wraps(start)
    def count_and_start(agent: Any, group: Any) -> Any:
        nonlocal restart_count
        restart_count += 1
        os.environ[RESTART_COUNT_VARIABLE] = str(restart_count)  # The ranks inherit it.
        return start(agent, group)

    agent_class._start_workers = count_and_start


def _record_restarts(agent_class: Any, folder: RunFolder) -> None:
    """Let torchrun's agent record each failure after which it restarts the ranks."""
    monitor = agent_class._monitor_workers

    @wraps(monitor)
    def monitor_and_record(agent: Any, group: Any) -> Any:
        result = monitor(agent, group)
        if result.is_failed() and result.failures and agent._remaining_restarts > 0:
            rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
            try:
                _record_restart(folder, rank, failure)
            except OSError as error:
                tell(f"torchrun: the restart was not recorded: {error}")
        return result

    agent_class._monitor_workers = monitor_and_record


def _stop_with_a_rank(agent_class: Any, signal_exception: Any) -> None:
    """Let torchrun stop all ranks when one has stopped by itself; else it would start them again."""
    monitor = agent_class._monitor_workers

    def stop() -> NoReturn:
        sent = signal.Signals(_for_ranks(signal.SIGUSR2))
        raise signal_exception("A rank has stopped by itself.", sent)

    @wraps(monitor)
    def monitor_or_stop(agent: Any, group: Any) -> Any:
        handlers = getattr(agent._pcontext, "subprocess_handlers", {}).values()
        if any(handler.proc.poll() == EXIT_STOPPED for handler in handlers):
            stop()
        result = monitor(agent, group)
        # A rank may have ended since the look above.
        if any(failure.exitcode == EXIT_STOPPED for failure in result.failures.values()):
            stop()
        return result

    agent_class._monitor_workers = monitor_or_stop


def _record_restart(folder: RunFolder, rank: int, failure: Any) -> None:
    """Record that the ranks restart after the failure of `rank`."""
    run = RunContext.read(os.environ)
    generation = run.restart_count
    lines = capture.last_lines(folder.rank_log(run.attempt, rank))
    node = detect(os.environ).node_rank
    remedy = hint_after(lines[-1]) if lines else ""
    cause = capture.here(int(failure.exitcode), node_rank=node, rank=rank, lines=lines, remedy=remedy)
    if is_consequence(cause):
        time.sleep(_CAUSE_S)
    # Each node's torchrun gets here, and the first one records.
    if not run.is_superseded and capture.record(folder, run.attempt, cause, generation=generation):
        reason = describe(cause)
        run.add_event("restarted", generation=generation + 1, reason=reason, node=node, rank=rank, step=-1)


def _report(folder: RunFolder, rank: int, failure: Any, page: HeartbeatPage) -> int:
    """Print how the first rank failed, with its last lines; return the exit code of this torchrun.

    The agent learns from this torchrun's own page what to do about the error.
    """
    code = int(failure.exitcode)
    lines = capture.last_lines(folder.rank_log(RunContext.read(os.environ).attempt, rank))
    ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
    if failure.local_rank:  # The lines of local rank 0 stand in this log.
        tell("\n".join(lines))
    hint = hint_after(lines[-1]) if lines else ""
    if hint:
        page.report_error(ReportedError("", hint))
        tell(f"{HINT}{hint}")
    tell(f"torchrun: rank {rank} {ended}.")
    return code if code > 0 else EXIT_FAILED


def main(argv: Sequence[str]) -> NoReturn:
    """Become the rank that torchrun has started: `RUN_DIR PID_OF_TORCHRUN DESCRIPTORS_OF_ITS_PAGES`."""
    folder, torchrun = RunFolder(argv[0]), int(argv[1])
    config = folder.config()
    enter_project(folder, config.get("project_dir"))
    run = RunContext.read(os.environ)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if run.restart_count:
        limit = _max_restarts(rules_of(config, 1))
        log = folder.rank_log(run.attempt, rank)
        with log.open("a", encoding="utf-8") as stream:
            stream.write(f"torchrun: restart {run.restart_count} (a node may cause at most {limit})\n")
    # torchrun closes all descriptors of its workers, so the rank opens its heartbeat page again.
    page = os.open(f"/proc/{torchrun}/fd/{argv[2].split(',')[local_rank]}", os.O_RDWR)
    HeartbeatPage(page).reset()
    worker.be_rank(
        worker.RankSpec(
            local_rank=local_rank,
            environ={
                RESTART_COUNT_VARIABLE: str(run.restart_count),
                HEARTBEAT_VARIABLE: str(page),
            },
            log=Path(folder.rank_log(run.attempt, rank)),
            entry=user_program.ENTRY,
            run_dir=argv[0],
        ),
        torchrun,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
