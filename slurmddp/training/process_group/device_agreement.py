"""What every rank computes on, told to all before anything is exchanged: one kind for all, a GPU for each.

A rank that refuses to go on by itself leaves the others waiting in the first collective, for as long as that
may take, and so do ranks that wait there under different backends. So each rank says what it has, or why it
has nothing; rank 0 looks at what all have said, and all go on, or none.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from slurmddp.errors import EXIT_CONFIG, EXIT_FAILED, RankFailure, SlurmddpError
from slurmddp.training.process_group.signed_store import READ_S, SignedStore

_KEY = "slurmddp/claims"


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """What one rank says it computes on."""

    node: int
    """Its node rank."""
    host: str = field(default_factory=socket.gethostname)
    kind: str = "cpu"
    """The type of its device."""
    backend: str | None = None
    identity: str = ""
    """What tells its GPU from all others; empty where nothing does."""
    trouble: str = ""
    """Why it has nothing to compute on; empty where it has."""
    hint: str = ""
    unfit: bool = False
    """Whether its node shows fewer GPUs than SLURM has given to its ranks, or one that does not answer."""


@dataclass(frozen=True, kw_only=True)
class DeviceConflict:
    """Why the ranks can't compute together, and which nodes (node ranks) are to blame; none: the job is."""

    text: str
    hint: str
    nodes: Sequence[int]


class DevicesError(SlurmddpError):
    """The devices of the ranks don't go together; raised on all of them."""

    def __init__(self, refusal: DeviceConflict) -> None:
        super().__init__(refusal.text, hint=refusal.hint)
        self.nodes = tuple(refusal.nodes)
        # On other nodes the same job would do, so it is no wrong value.
        self.exit_code = EXIT_FAILED if self.nodes else EXIT_CONFIG


def settle(
    store: SignedStore, rank: int, world_size: int, claim: DeviceReport, *, patience_s: float = 60.0
) -> None:
    """Tell all ranks what this one computes on; every rank calls it. Raises DevicesError on all or on none.

    RankFailure when a rank says nothing for `patience_s` seconds, or goes away.
    """
    try:
        store.set(f"{_KEY}/{rank}", json.dumps(asdict(claim)))
        if rank == 0:
            refusal = judge(_collect(store, world_size, patience_s))
            store.set(_KEY, json.dumps(asdict(refusal) if refusal else None))
        else:
            refusal = _verdict(store, patience_s)
    except RuntimeError as error:
        raise _silence(patience_s) from error
    if refusal:
        store.until_read(_KEY, rank, world_size)
        raise DevicesError(refusal)


def _verdict(store: SignedStore, patience_s: float) -> DeviceConflict | None:
    (told,) = store.wait([_KEY], patience_s + READ_S)
    if told is None:
        raise _silence(patience_s)
    facts = json.loads(told)
    return DeviceConflict(**facts) if facts else None


def _silence(patience_s: float) -> RankFailure:
    return RankFailure(
        f"Rank 0 went away, or did not say for {patience_s:g} s whether all devices are right.",
        hint="Its log says why.",
    )


def _collect(store: SignedStore, world_size: int, patience_s: float) -> list[DeviceReport]:
    told = store.wait([f"{_KEY}/{rank}" for rank in range(world_size)], patience_s)
    if missing := [str(rank) for rank, text in enumerate(told) if text is None]:
        raise RankFailure(
            f"Rank {', '.join(missing[:8])}{', ...' if len(missing) > 8 else ''} met the others, but did not "
            f"say for {patience_s:g} s what it computes on.",
            hint="The log of that rank says why.",
        )
    return [DeviceReport(**json.loads(text)) for text in told if text is not None]


def judge(claims: Sequence[DeviceReport]) -> DeviceConflict | None:
    """Return why the ranks that claim these devices can't compute together; None where they can."""
    if troubled := [rank for rank, claim in enumerate(claims) if claim.trouble]:
        first = claims[troubled[0]]
        return _refusal(claims, troubled, first.trouble, first.hint)
    kinds = Counter((claim.kind, claim.backend) for claim in claims)
    if len(kinds) > 1:
        usual = max(kinds, key=lambda one: (one[0] != "cpu", kinds[one]))
        odd = [rank for rank, claim in enumerate(claims) if (claim.kind, claim.backend) != usual]
        found = claims[odd[0]]
        text = f"it computes on {found.kind} with {found.backend}, others on {usual[0]} with {usual[1]}."
        hint = "Look there for what is missing (`nvidia-smi`, the build of torch), or hide the GPUs from all."
        return _refusal(claims, odd, text, hint)
    return _shared(claims)


def _shared(claims: Sequence[DeviceReport]) -> DeviceConflict | None:
    owners: dict[str, int] = {}
    for rank, claim in enumerate(claims):
        owner = owners.setdefault(claim.identity, rank) if claim.identity else rank
        if owner != rank:
            each = sum(other.node == claim.node for other in claims)
            text = f"it was given {claim.kind} {claim.identity}, which rank {owner} has already."
            return _refusal(claims, [rank], text, f"Ask for `--gpus-per-node={each}` and no `--gpu-bind`.")
    return None


def _refusal(claims: Sequence[DeviceReport], ranks: Sequence[int], text: str, hint: str) -> DeviceConflict:
    first = ranks[0]
    hosts = list(dict.fromkeys(claims[rank].host for rank in ranks[1:]))
    where = ", ".join(hosts[:8]) + (", ..." if len(hosts) > 8 else "")
    more = f" So it is with {len(ranks) - 1} more rank(s), on {where}." if hosts else ""
    nodes = sorted({claims[rank].node for rank in ranks if claims[rank].unfit})
    return DeviceConflict(text=f"Rank {first} on {claims[first].host}: {text}{more}", hint=hint, nodes=nodes)
