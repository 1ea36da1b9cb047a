"""Check, before the first collective, that the devices of all ranks are compatible.

All ranks need the same device type and the same backend, and no two ranks may share a GPU. A rank that raised
by itself would leave the others waiting in a collective. So each rank reports its device, or why it has no
device, and rank 0 decides for all: either all ranks continue or all raise the same error.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

import torch

from slurmddp.environments.rank_info import RankInfo
from slurmddp.errors import EXIT_CONFIG, EXIT_FAILED, MismatchError, RankFailure, SlurmddpError
from slurmddp.short_text import first_items, first_line
from slurmddp.training.device.cuda import identity_of, lacks_gpus, take_device
from slurmddp.training.process_group.signed_store import SignedStore

_log = logging.getLogger(__name__)
_KEY = "slurmddp/devices"


@dataclass(frozen=True, kw_only=True)
class DeviceReport:
    """The report of one rank about its device, or about why it has none; sent to rank 0."""

    node: int
    """The node rank."""
    host: str = field(default_factory=socket.gethostname)
    kind: str = "cpu"
    """The type of the device: `cpu` or `cuda`."""
    backend: str | None = None
    identity: str = ""
    """A name that no other GPU has; empty for CPUs, and if torch knows no UUID."""
    trouble: str = ""
    """Why the rank has no device; empty if it has one."""
    hint: str = ""
    unhealthy: bool = False
    """Whether the node shows fewer GPUs than SLURM gave to its ranks, or a GPU that does not answer."""


class DevicesError(SlurmddpError):
    """Error on all ranks: their devices are not compatible, or ranks have no device.

    Attributes:
        nodes: node ranks of the unhealthy nodes; empty if the settings of the job are wrong.
    """

    def __init__(self, message: str, *, hint: str, nodes: Sequence[int]) -> None:
        super().__init__(message, hint=hint)
        self.nodes = tuple(nodes)
        # If a node is unhealthy, the configuration is right: the same job can run on other nodes.
        self.exit_code = EXIT_FAILED if self.nodes else EXIT_CONFIG


def report_device(info: RankInfo, backend: str) -> tuple[torch.device, str, DeviceReport]:
    """Make this rank's GPU its current device, and describe the device for the other ranks.

    If the rank finds no device, the function does not raise but returns the CPU and a report with `trouble`.
    The rank can then meet the other ranks and send them the report, and all ranks raise.

    Args:
        info: this rank.
        backend: `auto` (nccl on GPUs, else gloo), a name that `register` takes, or a device string.

    Returns:
        The device, its backend, and the report.

    Raises:
        DevicesError: this is the only rank, and it finds no device.
    """
    node_lacks_gpus = False
    try:
        node_lacks_gpus = lacks_gpus(info)
        device, device_backend = take_device(info, backend)
        identity = identity_of(device)
    except (MismatchError, RuntimeError) as error:
        report = _report_of_failure(info, error, node_lacks_gpus)
        _log.error("no device: %s", report.trouble)
        conflict = find_conflict([report])
        if info.world_size == 1 and conflict is not None:
            raise conflict from error
        return torch.device("cpu"), "gloo", report

    report = DeviceReport(
        node=info.node_rank,
        kind=device.type,
        backend=device_backend,
        identity=identity,
        unhealthy=node_lacks_gpus,
    )
    return device, device_backend, report


def _report_of_failure(info: RankInfo, error: Exception, node_lacks_gpus: bool) -> DeviceReport:
    """Return the report of a rank that found no device because of `error`.

    A MismatchError means wrong settings: the node is unhealthy only if it lacks GPUs. Any other error comes
    from CUDA, and the node is unhealthy.
    """
    if isinstance(error, MismatchError):
        return DeviceReport(
            node=info.node_rank, trouble=error.message, hint=error.hint, unhealthy=node_lacks_gpus
        )

    trouble = f"its GPU can't be used: {first_line(error)}"
    hint = "Have the GPUs of that node examined (`nvidia-smi`, the kernel's log)."
    return DeviceReport(node=info.node_rank, trouble=trouble, hint=hint, unhealthy=True)


def agree_on_devices(
    store: SignedStore, info: RankInfo, report: DeviceReport, *, timeout_s: float = 60.0
) -> None:
    """Exchange the reports of all ranks, and raise unless the devices are compatible. Every rank calls it.

    Args:
        store: the store that all ranks share.
        info: this rank.
        report: the report of this rank.
        timeout_s: seconds that rank 0 waits for the reports.

    Raises:
        DevicesError: on all ranks, if the devices are not compatible.
        RankFailure: a rank does not report within `timeout_s`, or rank 0 exits.
    """

    def decide(texts: list[str | None]) -> str:
        missing = [rank for rank, text in enumerate(texts) if text is None]
        if missing:
            raise RankFailure(
                f"Rank {first_items(missing, 8, rest=', ...')} met the others, but did "
                f"not report its device within {timeout_s:g} s.",
                hint="The log of each of these ranks shows why.",
            )

        conflict = find_conflict([DeviceReport(**json.loads(text)) for text in texts if text is not None])
        if conflict is None:
            return json.dumps(None)
        return json.dumps([conflict.message, conflict.hint, conflict.nodes])

    text = json.dumps(asdict(report))
    decision = json.loads(
        store.decide_at_zero(_KEY, info, text, decide, subject="the devices", timeout_s=timeout_s)
    )
    if decision is not None:
        # The store ends with rank 0's process, so rank 0 waits until all ranks have read the decision.
        store.await_all(f"{_KEY}/read", info)
        message, hint, nodes = decision
        raise DevicesError(message, hint=hint, nodes=nodes)


def find_conflict(reports: Sequence[DeviceReport]) -> DevicesError | None:
    """Return an error if the devices in the reports are not compatible, else None."""
    failed = [rank for rank, report in enumerate(reports) if report.trouble]
    if failed:
        first = reports[failed[0]]
        return _conflict(reports, failed, first.trouble, first.hint)

    return _find_other_kind(reports) or _find_shared_gpu(reports)


def _find_other_kind(reports: Sequence[DeviceReport]) -> DevicesError | None:
    """Return an error if not all ranks have the same device type and backend, else None."""
    kinds = Counter((report.kind, report.backend) for report in reports)
    if len(kinds) <= 1:
        return None

    # Blame ranks on CPUs even if they are the majority: a rank that sees no GPU falls back to the CPU.
    # Among GPUs (or CPUs alone), the most frequent backend counts as right.
    usual = max(kinds, key=lambda kind: (kind[0] != "cpu", kinds[kind]))
    odd_ranks = [rank for rank, report in enumerate(reports) if (report.kind, report.backend) != usual]
    first = reports[odd_ranks[0]]
    text = f"it computes on {first.kind} with {first.backend}, others on {usual[0]} with {usual[1]}."
    hint = "Find what is missing there (`nvidia-smi`, the build of torch), or hide the GPUs from all ranks."
    return _conflict(reports, odd_ranks, text, hint)


def _find_shared_gpu(reports: Sequence[DeviceReport]) -> DevicesError | None:
    """Return an error if two ranks have the same GPU, else None."""
    owners: dict[str, int] = {}
    for rank, report in enumerate(reports):
        owner = owners.setdefault(report.identity, rank) if report.identity else rank
        if owner != rank:
            ranks_on_node = sum(other.node == report.node for other in reports)
            text = f"it was given {report.kind} {report.identity}, which rank {owner} has already."
            hint = f"Ask for `--gpus-per-node={ranks_on_node}` and no `--gpu-bind`."
            return _conflict(reports, [rank], text, hint)

    return None


def _conflict(reports: Sequence[DeviceReport], ranks: Sequence[int], text: str, hint: str) -> DevicesError:
    """Return an error whose message is about the first of `ranks`, and lists the hosts of the others.

    Args:
        reports: the reports of all ranks.
        ranks: the ranks that have the problem.
        text: the problem, as a sentence that follows the first rank and its host.
        hint: the remedy.
    """
    first = ranks[0]
    hosts = list(dict.fromkeys(reports[rank].host for rank in ranks[1:]))
    where = first_items(hosts, 8, rest=", ...")
    more = f" The same holds for {len(ranks) - 1} more rank(s), on {where}." if hosts else ""
    nodes = sorted({reports[rank].node for rank in ranks if reports[rank].unhealthy})
    return DevicesError(f"Rank {first} on {reports[first].host}: {text}{more}", hint=hint, nodes=nodes)
