"""Check every node before the training starts (`preflight=on`).

    device, memory, disk, limits   each rank by itself
    run folder                     the first ranks of the first two nodes measure its file system
    pairs                          one rank of each node exchanges known numbers with one rank of another node
    sum, clocks                    all ranks together

Ranks send their findings over rank 0's store, which works even if the network between the devices fails. Rank
0 decides for all ranks. It writes an unhealthy node to `excluded.jsonl`, and all ranks exit with the code
that asks for other nodes. If the job has a spare node, the agent of node 0 uses it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from slurmddp.checkpoint.memory.channel import WriterChannel
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import SlurmddpError, UnhealthyNodeError
from slurmddp.runs.folder.excluded_nodes import exclude
from slurmddp.runs.folder.file_system import SLOW_S
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.short_text import first_items, typed_first_line
from slurmddp.training.preflight.checks import (
    CHECKS,
    NOBODY,
    NODE,
    RUN,
    Check,
    CheckContext,
    NodeFault,
    run_checks,
)
from slurmddp.training.preflight.pairs import Pair, check_pairs, check_sum
from slurmddp.training.preflight.run_folder import findings as run_folder_findings
from slurmddp.training.preflight.run_folder import measure_run_folder, takes_part
from slurmddp.training.preflight.timeout import within
from slurmddp.training.preflight.verdicts import (
    can_exclude,
    check_clocks,
    find_faulty,
    node_names,
    others_may_be_healthy,
    suspects,
)
from slurmddp.training.process_group.device_agreement import DevicesError
from slurmddp.training.process_group.setup import RankContext
from slurmddp.training.process_group.signed_store import SignedStore

_log = logging.getLogger(__name__)

CHECK_S = 20.0
"""Seconds that one check of a rank may take: the first call of CUDA takes seconds, or hangs."""
PAIR_S = 10.0
"""The longest duration of a round of pairs, in seconds."""
FILES_S = 30.0
"""The longest duration of the measurement of the run folder, in seconds; it mostly takes less than one."""
ANSWER_S = 60.0
"""Seconds that rank 0 waits for the answer of another rank."""
_NOT_RECORDED = ("folder", "shortfalls")
"""Fields of the measured file system that its event leaves out, because other records have them."""
_SHOWN = 8
"""The largest number of findings in the error message; the event contains all."""


@dataclass(frozen=True, kw_only=True)
class PartResult:
    """The result of one part of the preflight, which a rank sends to rank 0."""

    findings: Sequence[NodeFault] = ()
    failed_pairs: Mapping[Pair, str] = field(default_factory=dict)
    at: float = field(default_factory=lambda: time.time())
    """When the answer was made, in seconds since the epoch by this node's clock."""

    def to_json(self) -> str:
        failed = [[*pair, why] for pair, why in self.failed_pairs.items()]
        return json.dumps([[asdict(finding) for finding in self.findings], failed, self.at])

    @classmethod
    def from_json(cls, text: str) -> PartResult:
        findings, failed, at = json.loads(text)
        return cls(
            findings=[NodeFault(**facts) for facts in findings],
            failed_pairs={(a, b): why for a, b, why in failed},
            at=at,
        )


def run(
    context: RankContext,
    folder: RunFolder,
    config: Mapping[str, Any],
    *,
    checks: Sequence[Check] = CHECKS,
    check_s: float = CHECK_S,
    pair_s: float = PAIR_S,
    seen_s: float = SLOW_S,
) -> None:
    """Check all nodes, and return if they are healthy; every rank calls it.

    Args:
        context: this rank, with its process group.
        folder: the run folder.
        config: the configuration of the run.
        checks: the checks that each rank makes by itself.
        check_s: seconds that one of `checks` may take.
        pair_s: seconds that a round of exchanges between pairs of nodes, or the sum, may take.
        seen_s: seconds to wait until a node sees a file of another node.

    Raises:
        UnhealthyNodeError: on all ranks, if a node is unhealthy and the next attempt excludes it.
        SlurmddpError: on all ranks, if a check failed and no node can be excluded.
    """
    info = context.info
    device = context.device
    preflight = _Preflight(info, context.store, folder, config)

    workers = int((config.get("train") or {}).get("workers") or 0)
    facts = CheckContext(info=info, device=device, node=preflight.node, folder=folder, workers=workers)
    preflight.share("own", PartResult(findings=run_checks(checks, facts, check_s)))
    if context.store is not None:
        preflight.share("files", PartResult(findings=preflight.check_files(device, seen_s)))
        preflight.share("pairs", PartResult(failed_pairs=check_pairs(info, device, pair_s)))
        reason = check_sum(device, pair_s)
        findings = [_failed_sum(info.rank, preflight.node, reason)] if reason else []
        preflight.share("sum", PartResult(findings=findings))

    preflight.end()


def _failed_sum(rank: int, node: str, reason: str) -> NodeFault:
    text = f"the sum over all ranks failed on rank {rank}: {reason}."
    hint = "All pairs of nodes exchange data, so look for a fault that shows only with all ranks at once."
    return NodeFault(node=node, text=text, hint=hint, fault=RUN)


def exclude_conflicting_nodes(
    info: RankInfo, folder: RunFolder, config: Mapping[str, Any], error: DevicesError
) -> None:
    """Raise UnhealthyNodeError if the next attempt can avoid the nodes whose devices `error` names.

    Every rank calls it after the same `error`, which was raised before the preflight could start.
    """
    preflight = _Preflight(info, None, folder, config)
    findings = [
        NodeFault(node=preflight.names[node], text=error.message, hint=error.hint) for node in error.nodes
    ]
    preflight.conclude(findings)


class PreflightResult(NamedTuple):
    """Rank 0's decision after the findings of all ranks: which nodes to exclude, and whether to end."""

    failed: list[str]
    """Sentences of the findings that end the preflight."""
    excluded: Mapping[str, str]
    """Names of the nodes that the next attempts avoid, each with the reason."""
    unhealthy: Mapping[int, str]
    """Node ranks of the nodes that a spare may replace, each with the reason."""


class _Preflight:
    """One preflight on this rank: it sends findings to rank 0, which decides, and receives the decision."""

    def __init__(
        self, info: RankInfo, store: dist.Store | None, folder: RunFolder, config: Mapping[str, Any]
    ) -> None:
        self.info = info
        self._folder = folder
        self._store = SignedStore(dist.HashStore() if store is None else store, info.launch_id)
        self._run = RunContext.read(os.environ, folder)
        self._hours = int((config.get("policy") or {}).get("exclude_failed_h", 24))
        self._began = time.monotonic()
        self._continued = 0.0
        """The time, by rank 0's clock, of its last decision that let all ranks continue. Ranks make their
        next answers after this time."""
        self._files: dict[str, Any] = {}
        """The measured file system of the run folder; empty on all ranks but rank 0."""

        self.names = node_names(info)
        self.node = self.names[info.node_rank]

    def check_files(self, device: torch.device, seen_s: float) -> list[NodeFault]:
        """Measure the file system of the run folder, if this rank takes part; rank 0 returns the findings."""
        if not takes_part(self.info):
            return []

        try:
            files = within(
                FILES_S,
                lambda: measure_run_folder(self.info, self._store, self._folder, self.names, seen_s),
                device,
            )
        except Exception as error:
            text = f"its file system could not be measured from {self.node}: {typed_first_line(error)}."
            hint = "Have the mount of this folder examined, or use another runs_dir."
            return [NodeFault(node="run folder", text=text, hint=hint, fault=RUN)]

        if self.info.rank != 0:
            return []
        self._files = {key: value for key, value in asdict(files).items() if key not in _NOT_RECORDED}
        return list(run_folder_findings(files))

    def share(self, part: str, answer: PartResult) -> None:
        """Send this rank's results of one part of the preflight to rank 0, and wait for rank 0's decision.

        Args:
            part: "own", "files", "pairs" or "sum".
            answer: the results of this rank.

        Raises:
            UnhealthyNodeError: on all ranks, if the next attempt excludes unhealthy nodes.
            SlurmddpError: on all ranks, if a check failed and no node is excluded.
        """
        key = f"slurmddp/preflight/{part}"

        def decide(texts: list[str | None]) -> str:
            verdict = self._judge(part, [PartResult.from_json(text) if text else None for text in texts])
            self._continued = time.time()
            return json.dumps(verdict)

        decision = self._store.decide_at_zero(
            key, self.info, answer.to_json(), decide, subject="the preflight", timeout_s=ANSWER_S
        )
        verdict = PreflightResult(*json.loads(decision))
        if not verdict.failed:
            return

        _report_unhealthy(verdict.unhealthy)
        # The store ends with rank 0's process, so rank 0 waits until all ranks have read the decision.
        self._store.await_all(f"{key}/read", self.info)
        if verdict.excluded:
            raise _unhealthy_nodes(verdict)

        hint = "No node was excluded. Use preflight=off to start without these checks."
        raise SlurmddpError(f"Preflight: {_shortened(verdict.failed)}", hint=hint)

    def conclude(self, findings: Sequence[NodeFault]) -> None:
        """Record findings that all ranks have made alike; raise UnhealthyNodeError if a node is excluded."""
        verdict = self._verdict(findings)
        if self.info.rank == 0 and not self._run.is_superseded:
            self._record(findings, verdict)

        _report_unhealthy(verdict.unhealthy)
        if verdict.excluded:
            raise _unhealthy_nodes(verdict)

    def end(self) -> None:
        """Record in the run folder that all nodes are healthy."""
        if self.info.rank == 0 and not self._run.is_superseded:
            self._add_event(failed=[])

    def _judge(self, part: str, answers: Sequence[PartResult | None]) -> PreflightResult:
        """Decide on the results of all ranks, record the decision in the run folder, and return it.

        It is recorded before it is sent, because ranks that receive it may exit at once.
        """
        received = [answer for answer in answers if answer is not None]
        findings = [finding for answer in received for finding in answer.findings]

        failed = {pair: reason for answer in received for pair, reason in answer.failed_pairs.items()}
        events = self._folder.readable_events() if failed else []
        findings += find_faulty(failed, self.names, suspects(events, self._run.attempt, self.names))

        # The last part serves to compare the clocks. Each rank answered after `_continued`, when rank 0 sent
        # its decision on the part before, and before now: its clock must show a time between these two.
        if part == "sum" and len(received) == len(answers):
            stamps = [answer.at for answer in received[:: self.info.local_world_size]]
            findings += check_clocks(self.names, stamps, self._continued, time.time())

        findings += [self._missing_answer(rank) for rank, answer in enumerate(answers) if answer is None]
        verdict = self._verdict(findings)
        # A later attempt of the run now owns the run folder, so write nothing there, and exclude no node.
        if self._run.is_superseded:
            return PreflightResult(verdict.failed, {}, {})

        self._record(findings, verdict, [[self.names[node] for node in pair] for pair in failed])
        return verdict

    def _missing_answer(self, rank: int) -> NodeFault:
        node = self.names[rank // self.info.local_world_size]
        text = f"rank {rank} sent no findings within {ANSWER_S:.0f} s."
        return NodeFault(node=node, text=text, hint="Its log may say why.")

    def _verdict(self, findings: Sequence[NodeFault]) -> PreflightResult:
        """Return which findings end the preflight, and which nodes to exclude or to replace.

        If more than half of the nodes are faulty, none is excluded or replaced.
        """
        reasons = {finding.node: finding.text for finding in findings if finding.fault == NODE}

        excluded: Mapping[str, str] = {}
        if self._hours > 0 and can_exclude(reasons, self.info):
            excluded = reasons
        unhealthy: Mapping[int, str] = {}
        if others_may_be_healthy(reasons, self.info.nodes):
            unhealthy = {self.names.index(node): reason for node, reason in reasons.items()}

        failed = [finding.sentence for finding in findings if finding.fault != NOBODY]
        return PreflightResult(failed, excluded, unhealthy)

    def _record(
        self,
        findings: Sequence[NodeFault],
        verdict: PreflightResult,
        failed_pairs: Sequence[Sequence[str]] = (),
    ) -> None:
        """Log the findings, record them in the run folder, and exclude the nodes of the decision."""
        for finding in findings:
            _log.warning("preflight: %s", finding.sentence)
            if finding.fault == NOBODY:
                text = f"Preflight: {finding.sentence}"
                self._folder.add_event("warned", attempt=self._run.attempt, about="preflight", text=text)

        for node, reason in verdict.excluded.items():
            exclude(self._folder, node, f"preflight: {reason}", hours=self._hours, found_by="preflight")

        if verdict.failed:
            facts = {"unfit": verdict.unhealthy, "pairs": failed_pairs}
            self._add_event(verdict.failed, **{name: fact for name, fact in facts.items() if fact})

    def _add_event(self, failed: list[str], **facts: object) -> None:
        """Add an event about the preflight to the run folder.

        Args:
            failed: the findings that end the preflight; empty if all nodes are healthy.
            facts: further values: `unfit` has node ranks as keys, `pairs` lists pairs of node names.
        """
        seconds = round(time.monotonic() - self._began, 3)
        if self._files:
            facts["files"] = self._files
        _log.info("preflight: %d node(s), %.2f s", self.info.nodes, seconds)
        self._run.add_event(
            "preflight",
            restart_count=self._run.restart_count,
            seconds=seconds,
            nodes=self.info.nodes,
            failed=failed,
            **facts,
        )


def _report_unhealthy(nodes: Mapping[int, str]) -> None:
    """Report unhealthy nodes (node ranks and reasons) to the agent, so that no more ranks start on them."""
    if not nodes:
        return

    # Without an agent nobody would receive the report, and there is no spare node.
    channel = WriterChannel.attach(os.environ)
    if channel is None:
        return

    try:
        channel.send({"kind": "unhealthy", "nodes": nodes})
    except OSError as error:
        _log.warning("The report of unhealthy nodes did not reach the agent: %s", error)
    finally:
        channel.close()


def _shortened(failed: Sequence[str]) -> str:
    return first_items(failed, _SHOWN, separator=" ", rest=" And {} more.")


def _unhealthy_nodes(verdict: PreflightResult) -> UnhealthyNodeError:
    hint = f"The next attempt runs on other nodes than {', '.join(verdict.excluded)}."
    return UnhealthyNodeError(f"Preflight: {_shortened(verdict.failed)}", hint=hint)
