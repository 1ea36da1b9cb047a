"""A look at every node before the training starts (`preflight=on`): better no start than one on a bad node.

    device, memory, disk, limits   each rank by itself
    pairs                          one rank of each node trades known numbers with one of another
    sum, clocks                    all ranks together

Ranks tell what they have found over the store in which they met, which works also where the network between
the devices doesn't. Rank 0 judges for all. A node that is not fit is noted in `excluded.jsonl`, and the ranks
end with the code that asks for other nodes; where the job has a spare, node 0's agent takes it.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from slurmddp.checkpoint.memory.channel import Channel
from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import RankFailure, SlurmddpError, UnhealthyNodeError
from slurmddp.runs.folder.excluded import exclude
from slurmddp.runs.folder.layout import RunFolder
from slurmddp.runs.folder.run_context import RunContext
from slurmddp.training.preflight import pairs
from slurmddp.training.preflight.checks import CHECKS, NOBODY, NODE, RUN, Check, Finding, Surroundings, look
from slurmddp.training.preflight.pairs import Pair
from slurmddp.training.preflight.timeout import within
from slurmddp.training.preflight.verdicts import (
    blame,
    can_be_avoided,
    judge_clocks,
    node_names,
    others_may_do_better,
    suspects,
)
from slurmddp.training.process_group.device_agreement import DevicesError
from slurmddp.training.process_group.setup import RankContext
from slurmddp.training.process_group.signed_store import SignedStore

_log = logging.getLogger(__name__)

CHECK_S = 20.0
"""How long one check of a rank by itself may take: a GPU's first touch takes seconds, or hangs."""
PAIR_S = 10.0
"""How long a node waits for its partner; all begin a round at the same time."""
ANSWER_S = 60.0
"""How long rank 0 waits for the answer of another rank."""
_RANK_ZERO_S = 10.0
"""How much longer than that the others wait for rank 0."""
_SAID = 8
"""So many findings stand in the error; the event holds all."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What one rank tells rank 0 after a part of the preflight."""

    findings: Sequence[Finding] = ()
    failed_pairs: Mapping[Pair, str] = field(default_factory=dict)
    at: float = field(default_factory=lambda: time.time())
    """When it was given, by this node's clock."""

    def to_json(self) -> str:
        failed = [[*pair, why] for pair, why in self.failed_pairs.items()]
        return json.dumps([[asdict(finding) for finding in self.findings], failed, self.at])

    @classmethod
    def from_json(cls, text: str | bytes) -> Answer:
        findings, failed, at = json.loads(text)
        return cls(
            findings=[Finding(**one) for one in findings],
            failed_pairs={(a, b): why for a, b, why in failed},
            at=at,
        )


def run(
    place: RankContext,
    folder: RunFolder,
    config: Mapping[str, Any],
    *,
    checks: Sequence[Check] = CHECKS,
    check_s: float = CHECK_S,
    pair_s: float = PAIR_S,
) -> None:
    """Look at all nodes; every rank calls it. Raises on all ranks when one node is not fit for training.

    That is UnhealthyNodeError when the next attempt gets other nodes, else SlurmddpError.
    """
    flight = _Flight(place.info, place.store, folder, config)
    workers = int((config.get("train") or {}).get("workers") or 0)
    here = Surroundings(
        info=place.info, device=place.device, node=flight.node, folder=folder, workers=workers
    )
    flight.share("own", Answer(findings=look(checks, here, check_s)))
    if place.store is not None:
        flight.share("pairs", Answer(failed_pairs=_meet_partners(place, pair_s)))
        flight.share("sum", Answer(findings=_sum(place, flight.node, pair_s)))
    flight.end()


def blame_devices(
    info: RankInfo, folder: RunFolder, config: Mapping[str, Any], refused: DevicesError
) -> None:
    """Raise UnhealthyNodeError if what the ranks found when they met lies on nodes that can be avoided.

    Every rank calls it, after the same refusal: what was looked at first has come before the preflight.
    """
    flight = _Flight(info, None, folder, config)
    found = [
        Finding(check="device", node=flight.names[node], text=refused.message, hint=refused.hint)
        for node in refused.nodes
    ]
    flight.conclude(found)


class Verdict(NamedTuple):
    """Rank 0's decision on the findings of all ranks."""

    failed: list[str]
    """Sentences of the findings that end the preflight."""
    avoided: list[str]
    """Names of the nodes that the next attempts avoid."""
    unhealthy: Mapping[int, str]
    """Node ranks of the nodes that a spare may replace, each with the reason."""


class _Flight:
    """What the ranks do together: tell rank 0 what they have found, and hear from it whether to go on."""

    def __init__(
        self, info: RankInfo, store: dist.Store | None, folder: RunFolder, config: Mapping[str, Any]
    ) -> None:
        self.info, self._folder = info, folder
        self._store = None if store is None else SignedStore(store, info.launch_id)
        self._run = RunContext.read(os.environ, folder)
        self._hours = int((config.get("policy") or {}).get("exclude_failed_h", 24))
        self._began = time.monotonic()
        self._told = 0.0
        """When rank 0 last let all go on: what they tell next is written after that."""
        self.names = node_names(info)
        self.node = self.names[info.node_rank]

    def share(self, part: str, own: Answer) -> None:
        """Share what the ranks found in one part of the preflight; raise on all if a node is not fit."""
        if self._store is None:
            verdict = self._judge(part, [own])
        elif self.info.rank == 0:
            verdict = self._judge(part, self._collect(self._store, part, own))
            self._told = time.time()
            self._store.set(_key(part), json.dumps(verdict))
        else:
            verdict = self._ask_zero(self._store, part, own)
        if not (verdict.failed or verdict.avoided):
            return
        _report_unhealthy(verdict.unhealthy)
        if self._store is not None:
            self._store.until_read(_key(part), self.info.rank, self.info.world_size)
        if verdict.avoided:
            raise _unfit(verdict.failed, verdict.avoided)
        hint = "No node was excluded for it. preflight=off starts without a look."
        raise SlurmddpError(f"Preflight: {_said(verdict.failed)}", hint=hint)

    def conclude(self, found: Sequence[Finding]) -> None:
        """Raise for findings that all ranks have already, if the next attempt avoids their nodes."""
        if self.info.rank == 0 and not self._run.is_superseded:
            self._record(found)
        failed, avoided = self._follows(found)
        _report_unhealthy(self._replaceable(found))
        if avoided:
            raise _unfit(failed, avoided)

    def end(self) -> None:
        """Record that all nodes are fit."""
        if self.info.rank == 0 and not self._run.is_superseded:
            self._add_event(failed=[])

    def _collect(self, store: SignedStore, part: str, own: Answer) -> list[Answer | None]:
        """Return every rank's answer, None for a rank that gave none in time."""
        there = store.wait([_key(part, rank) for rank in range(1, self.info.world_size)], ANSWER_S)
        return [own, *(Answer.from_json(text) if text else None for text in there)]

    def _ask_zero(self, store: SignedStore, part: str, own: Answer) -> Verdict:
        """Send rank 0 what was found here; return its verdict."""
        patience = ANSWER_S + _RANK_ZERO_S
        lost: RuntimeError | None = None
        try:
            store.set(_key(part, self.info.rank), own.to_json())
            (told,) = store.wait([_key(part)], patience)
        except RuntimeError as error:
            told, lost = None, error
        if told is None:
            raise RankFailure(
                f"Preflight: rank 0 on {self.names[0]} is gone, or told nothing for {patience:.0f} s.",
                hint="Its log may say why.",
            ) from lost
        return Verdict(*json.loads(told))

    def _judge(self, part: str, answers: Sequence[Answer | None]) -> Verdict:
        """Record and return the verdict on all answers: a rank that reads it leaves at once."""
        given = [answer for answer in answers if answer is not None]
        found = [finding for answer in given for finding in answer.findings]
        failed = {pair: why for answer in given for pair, why in answer.failed_pairs.items()}
        events = self._folder.events() if failed else []
        found += blame(failed, self.names, suspects(events, self._run.attempt, self.names))
        if part == "sum" and len(given) == len(answers):
            stamps = [answer.at for answer in given[:: self.info.local_world_size]]
            found += judge_clocks(self.names, stamps, self._told, time.time())
        found += [self._silent(rank) for rank, answer in enumerate(answers) if answer is None]
        if self._run.is_superseded:
            return Verdict([finding.sentence for finding in found if finding.blames != NOBODY], [], {})
        apart = [[self.names[node] for node in pair] for pair in failed]
        return self._record(found, apart)

    def _silent(self, rank: int) -> Finding:
        node = self.names[rank // self.info.local_world_size]
        text = f"rank {rank} did not tell what it found within {ANSWER_S:.0f} s."
        return Finding(check="answer", node=node, text=text, hint="Its log may say why.")

    def _record(self, found: Sequence[Finding], apart: Sequence[Sequence[str]] = ()) -> Verdict:
        """Record the findings, and the nodes that the next attempts avoid; return the verdict."""
        for finding in found:
            _log.warning("preflight: %s", finding.sentence)
            if finding.blames == NOBODY:
                text = f"Preflight: {finding.sentence}"
                self._folder.add_event("warned", attempt=self._run.attempt, about="preflight", text=text)
        failed, avoided = self._follows(found)
        for node, why in avoided.items():
            exclude(self._folder, node, f"preflight: {why}", hours=self._hours)
        unhealthy = self._replaceable(found)
        if failed:
            facts = {"unfit": unhealthy, "pairs": apart}
            self._add_event(failed, **{name: fact for name, fact in facts.items() if fact})
        return Verdict(failed, list(avoided), unhealthy)

    def _replaceable(self, found: Sequence[Finding]) -> dict[int, str]:
        """Return the unhealthy nodes by node rank, with reasons, if other nodes may do better."""
        unfit = self._unfit(found)
        spared = unfit if others_may_do_better(unfit, self.info.nodes) else {}
        return {self.names.index(node): why for node, why in spared.items()}

    def _follows(self, found: Sequence[Finding]) -> tuple[list[str], dict[str, str]]:
        """Return what has failed, and the nodes that the next attempts are to avoid, each with its reason."""
        failed = [finding.sentence for finding in found if finding.blames != NOBODY]
        unfit = self._unfit(found)
        return failed, unfit if self._hours > 0 and can_be_avoided(unfit, self.info) else {}

    def _unfit(self, found: Sequence[Finding]) -> dict[str, str]:
        return {finding.node: finding.text for finding in found if finding.blames == NODE}

    def _add_event(self, failed: list[str], **facts: object) -> None:
        """Record the preflight; `unfit` holds node ranks, `pairs` names of nodes (see `suspects`)."""
        seconds = round(time.monotonic() - self._began, 3)
        _log.info("preflight: %d node(s), %.2f s", self.info.nodes, seconds)
        self._run.add_event(
            "preflight",
            generation=self._run.restart_count,
            seconds=seconds,
            nodes=self.info.nodes,
            failed=failed,
            **facts,
        )


def _report_unhealthy(nodes: Mapping[int, str]) -> None:
    """Report the nodes to the agent, before this rank exits: the coordinator starts no more ranks on them."""
    channel = Channel.attach_copy(os.environ) if nodes else None
    if channel is None:
        return
    try:
        channel.send({"kind": "unhealthy", "nodes": nodes})
    except OSError as error:
        _log.warning("The agent could not be told which nodes are unhealthy: %s", error)
    finally:
        channel.close()


def _said(failed: Sequence[str]) -> str:
    return " ".join(failed[:_SAID]) + (f" And {len(failed) - _SAID} more." if len(failed) > _SAID else "")


def _unfit(failed: Sequence[str], avoided: Iterable[str]) -> UnhealthyNodeError:
    hint = f"The next attempt runs on other nodes than {', '.join(avoided)}."
    return UnhealthyNodeError(f"Preflight: {_said(failed)}", hint=hint)


def _key(part: str, rank: int | None = None) -> str:
    return f"slurmddp/preflight/{part}" + ("" if rank is None else f"/{rank}")


def _meet_partners(place: RankContext, pair_s: float) -> dict[Pair, str]:
    """Meet one node after the other, as all nodes do; return with whom that failed, and why."""
    info, began, failed = place.info, time.monotonic(), {}
    for number, met in enumerate(pairs.rounds(info.nodes), 1):
        pair = next((pair for pair in met if info.node_rank in pair), None)
        if info.local_rank != 0 or pair is None:
            continue
        peer = (pair[0] + pair[1] - info.node_rank) * info.local_world_size
        trade = partial(pairs.exchange, peer, place.device)
        try:
            why = within(began + number * pair_s - time.monotonic(), trade, place.device)
        except (RuntimeError, TimeoutError) as error:
            why = str(error).splitlines()[0]
        if why is not None:
            failed[pair] = why
    return failed


def _sum(place: RankContext, node: str, limit_s: float) -> list[Finding]:
    try:
        why = within(limit_s, partial(pairs.reduce_all, place.device), place.device)
    except (RuntimeError, TimeoutError) as error:
        why = str(error).splitlines()[0]
    if why is None:
        return []
    text = f"the sum over all ranks failed on rank {place.info.rank}: {why}."
    hint = "The pairs of nodes work, so look for what only all ranks at once need."
    return [Finding(check="sum", node=node, text=text, hint=hint, blames=RUN)]
