"""The ranks of one node: started for a generation, watched through their pages, and ended with it.

What outlives a rank is handed to the one that takes its place: its page, its log, states in memory.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from slurmddp.checkpoint.memory.service import Keeper
from slurmddp.environments.emit import rank_environment
from slurmddp.environments.names import (
    CHANNEL_VARIABLE,
    GENERATION_VARIABLE,
    HEARTBEAT_VARIABLE,
    IMPORTS_VARIABLE,
    MEMORY_VARIABLE,
    PREFLIGHT_VARIABLE,
)
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import EXIT_FINISHED, SlurmddpError
from slurmddp.host.address import Address
from slurmddp.host.heartbeat_page import Beat, Pulse
from slurmddp.host.oom import OomWatch
from slurmddp.host.ports import candidate_ports, listen, listen_as_rank_zero
from slurmddp.launchers.agent.rank_processes import RankExit, Ranks
from slurmddp.launchers.agent.worker import RankStart
from slurmddp.launchers.coordinator.restart_policy import Generation
from slurmddp.runs.failures import capture
from slurmddp.runs.failures.capture import Failure
from slurmddp.runs.failures.causes import LEFT_EARLY
from slurmddp.runs.failures.model import ENDED_BY_AGENT
from slurmddp.runs.folder.layout import RunFolder

_UNKILLABLE_S = 60.0
"""How long killed ranks may take to end: the kernel needs seconds to take large memories apart."""


@dataclass(frozen=True)
class Work:
    """What ranks run, the same in every generation."""

    folder: RunFolder
    attempt: int
    node: RankInfo
    """The place of the agent: one task on each node of the job."""
    ranks_per_node: int
    entry: str
    imports_s: float
    """How long it took until this agent could start ranks."""
    common: Mapping[str, str]
    """Variables that all ranks get."""


def place_of(node: RankInfo, generation: Generation) -> RankInfo:
    """Return the agent's place among those that run ranks in `generation`."""
    place = generation.agents.index(node.node_rank)
    return replace(
        node,
        rank=place,
        node_rank=place,
        world_size=len(generation.agents),
        nodes=len(generation.agents),
        hosts=tuple(node.hosts[agent] for agent in generation.agents),
    )


class Crew:
    """The ranks of this node, one generation after the other."""

    def __init__(self, work: Work, ranks: Ranks, keeper: Keeper) -> None:
        self._work, self._ranks, self._keeper = work, ranks, keeper
        self._pulses = [Pulse.create() for _ in range(work.ranks_per_node)]
        self._logged = [0] * work.ranks_per_node
        """How long each rank's log was when the rank began."""
        self._place = work.node
        self._own: Address | None = None
        """The address of this node at which ranks can meet, once it was asked for."""
        self._generation = 0
        self._gone_by = 0.0
        self._ended = False
        """Whether the ranks of this generation were told to end."""
        self._oom = OomWatch()
        self.left: list[Failure] = []
        """The ranks of this generation that have ended with 0: too early, should others have lost them."""
        ranks.on_exit = self._leave_exit

    def __len__(self) -> int:
        return len(self._ranks)

    def meeting_point(self, generation: Generation) -> tuple[str, int]:
        """Return MASTER_ADDR and MASTER_PORT for ranks that look for them; only node 0's agent asks."""
        node = self._work.node
        ports = candidate_ports(f"{node.launch_id} {generation.number} master")
        # Asked once: a name server that does not answer would hold up a restart, and the line between agents.
        # The order to begin tells the port, so any one does (`bool`).
        with listen(self._own, ports, bool) if self._own else listen_as_rank_zero(node, ports, bool) as probe:
            text, port = probe.getsockname()[:2]
            self._own = Address(probe.family, text)
            return text, int(port)

    def start(self, generation: Generation, master: str = "", port: int = 0, *, look: bool = True) -> None:
        """Begin the ranks that this node has in a generation; plain torch in them meets at `master`.

        `look`: whether they look at their nodes first, should the run have a preflight.
        """
        work = self._work
        self._place = place_of(work.node, generation)
        self._generation = generation.number
        self._ended = False
        self._oom.begin()
        self.left = []
        sys.stdout.flush()
        sys.stderr.flush()
        since = time.monotonic()
        common = {
            **work.common,
            GENERATION_VARIABLE: str(generation.number),
            PREFLIGHT_VARIABLE: str(int(look)),
            **({"MASTER_ADDR": master, "MASTER_PORT": str(port)} if port else {}),
            IMPORTS_VARIABLE: f"{0.0 if generation.number else work.imports_s:.3f} {since:.3f}",
        }
        for local_rank, pulse in enumerate(self._pulses):
            pulse.reset()
            log = self._log(local_rank)
            self._logged[local_rank] = _size(log)
            own = {
                HEARTBEAT_VARIABLE: str(pulse.descriptor),
                CHANNEL_VARIABLE: str(self._keeper.channel_for(local_rank)),
                MEMORY_VARIABLE: ",".join(map(str, self._keeper.memory_fds())),
            }
            environ = (
                common | rank_environment(self._place, local_rank, work.ranks_per_node, os.environ) | own
            )
            start = RankStart(
                local_rank=local_rank,
                environ=environ,
                log=log,
                entry=work.entry,
                run_dir=str(work.folder.path),
            )
            self._ranks.start(start)

    def signal(self, sent: signal.Signals) -> None:
        """Send `sent` to every rank that runs."""
        self._ranks.signal(sent)

    def reap(self) -> list[RankExit]:
        """Return the ranks that have ended since the last call."""
        ended = self._ranks.reap()
        self.left += [self._failure(one, LEFT_EARLY) for one in ended if one.returncode == EXIT_FINISHED]
        return ended

    def end(self, grace_s: float) -> None:
        """End every rank, with `grace_s` seconds for those that end by themselves."""
        self._ranks.reap()  # Who has ended before was not told to.
        self._ended = True
        self._ranks.end(grace_s)

    def kill(self) -> None:
        """Let every rank end at once; `is_gone` tells when they have."""
        self._ended = True
        self._gone_by = time.monotonic() + _UNKILLABLE_S
        self._ranks.kill()

    def is_gone(self) -> bool:
        """Whether `reap` has returned every rank; raises SlurmddpError when one can't be ended."""
        if self._ranks and time.monotonic() > self._gone_by:
            raise SlurmddpError(
                f"{len(self._ranks)} rank(s) on this node can't be ended: the kernel holds them in a call.",
                hint="A file server or a device does not answer; the node may need a restart.",
            )
        return not self._ranks

    def progress(self) -> dict[str, float]:
        """Return the last step that ranks of this generation have completed, -1: none, and how long ago."""
        beats = [pulse.read() for pulse in self._pulses]
        return {
            "step": max(beat.step for beat in beats),
            "silent_s": round(time.monotonic() - max(beat.stepped for beat in beats), 3),
        }

    def beats(self) -> dict[int, Beat]:
        """Return what the pages of the ranks that run show, by global rank."""
        return {
            self.rank(local_rank): self._pulses[local_rank].read() for local_rank in self._ranks.local_ranks
        }

    def processes(self) -> dict[int, tuple[int, Pulse]]:
        """Return pid and page of each rank that runs, by global rank."""
        return {
            self.rank(local_rank): (pid, self._pulses[local_rank])
            for pid, local_rank in zip(self._ranks.pids, self._ranks.local_ranks, strict=True)
        }

    def failures(self, ended: Sequence[RankExit]) -> list[Failure]:
        """Return what is to be told of ranks that ended badly."""
        return [self._failure(one) for one in ended if not one.good]

    def _failure(self, ended: RankExit, reason: str = "") -> Failure:
        since = self._logged[ended.local_rank]
        return capture.here(
            ended.returncode,
            node_rank=self._work.node.node_rank,
            rank=self.rank(ended.local_rank),
            local_rank=ended.local_rank,
            lines=capture.last_lines(self._log(ended.local_rank), since=since),
            reason=reason,
            generation=self._generation,
            oom=self._oom.verdict(),
        )

    def _leave_exit(self, ended: RankExit) -> None:
        """Write down how a rank has ended, also one that was told to: srun's code hides the first."""
        work, rank = self._work, self.rank(ended.local_rank)
        reason = ENDED_BY_AGENT if self._ended else ""
        capture.write_exit(work.folder, work.attempt, rank, ended.returncode, self._generation, reason)

    def rank(self, local_rank: int) -> int:
        """Return the global rank that a local one has in this generation."""
        return self._place.node_rank * self._work.ranks_per_node + local_rank

    def _log(self, local_rank: int) -> Path:
        return self._work.folder.rank_log(self._work.attempt, self.rank(local_rank))


def _size(log: Path) -> int:
    with suppress(OSError):
        return log.stat().st_size
    return 0
