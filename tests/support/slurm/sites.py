"""Sites as SLURM's commands print them: GPUs with types, memory that is allocated, limits of a QOS."""

from __future__ import annotations

from slurmddp.slurm.command_output import parse_facts
from slurmddp.slurm.limits import accounting
from slurmddp.slurm.limits.nodes import parse_groups
from slurmddp.slurm.limits.partitions import parse_partitions
from slurmddp.slurm.limits.site import Site

PARTITIONS = (
    "PartitionName=gpu AllowAccounts=ALL AllowQos=ALL Default=YES QoS=N/A GraceTime=60 MaxNodes=4 "
    "MaxTime=2-00:00:00 MaxCPUsPerNode=UNLIMITED RootOnly=NO PreemptMode=REQUEUE State=UP TotalNodes=6 "
    "MaxMemPerNode=UNLIMITED\n"
    "PartitionName=cpu AllowAccounts=physics AllowQos=ALL Default=NO QoS=tight GraceTime=0 "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED MaxCPUsPerNode=60 RootOnly=NO PreemptMode=OFF State=UP "
    "TotalNodes=20 MaxMemPerNode=200000\n"
    "PartitionName=old Default=NO MaxNodes=UNLIMITED MaxTime=60 RootOnly=NO State=DOWN TotalNodes=1\n"
    "PartitionName=admin Default=NO MaxNodes=UNLIMITED MaxTime=60 RootOnly=YES State=UP TotalNodes=1\n"
)
NODES = (
    "Welcome to alpha\n"
    "gpu|4|128|2:32:2|1031000|gpu:a100:8(S:0-1)|a100,ib|mixed\n"
    "gpu|2|96|2:48:1|500000|gpu:v100:4,nvme:1|v100|idle\n"
    "cpu|19|64|2:32:1|257000|(null)|(null)|idle\n"
    "cpu|1|64|2:32:1|257000|(null)|(null)|down*\n"
    "old|1|16|1:16:1|64000|gpu:2|(null)|idle\n"
    "admin|1|16|1:16:1|64000|(null)|(null)|idle\n"
)
CONFIG = (
    "Configuration data as of 2026-11-25T07:50:03\n"
    "AccountingStorageEnforce = associations,limits,qos,safe\n"
    "AccountingStorageType   = accounting_storage/slurmdbd\n"
    "ClusterName             = alpha\n"
    "PreemptType             = preempt/partition_prio\n"
    "SelectType              = select/cons_tres\n"
    "SelectTypeParameters    = CR_CORE_MEMORY\n"
)
QOS = (
    "normal|||||\nshort|00:30:00|cpu=300,gres/gpu=16,node=2||cpu=400|\ntight||node=10|3||\n"
    "long|||||PartitionTimeLimit\nwide||||node=9|PartitionMaxNodes,NoReserve\n"
)
ASSOCIATIONS = "physics||normal,short,tight,long,wide|normal|1-00:00:00|||\n"
ACCOUNTS = "root|||\nphysics||root|cpu=900\nphysics|ann|root|cpu=1\n"


def site(config: str = CONFIG, **queued: int) -> Site:
    """Return the site; `queued` counts the person's jobs by QOS."""
    facts = parse_facts(config)
    return Site(
        partitions=parse_partitions(PARTITIONS),
        groups=parse_groups(NODES),
        config=facts,
        accounting=accounting.Accounting(
            enforced=accounting.parse_enforced(facts.get("AccountingStorageEnforce", "")),
            qualities=accounting.parse_qualities(QOS),
            associations=accounting.parse_associations(ASSOCIATIONS, ACCOUNTS),
            default_account="physics",
            queued=accounting.parse_queued("".join(f"physics|{qos}\n" * n for qos, n in queued.items())),
        ),
    )
