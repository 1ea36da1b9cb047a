"""Describe every key of the configuration: type, default, meaning, bounds, and role in a run's identity.

A field of these dataclasses is the only description of a key. Defaults, checks, `slurmddp train --help`,
`docs/reference/configuration.md`, a run's name, a checkpoint's identity and the trainer's settings follow
from the field. To add a key, add a field.

Only `TrainSettings`, `PolicySettings` and `Cluster` are instantiated. The other dataclasses have no generated
methods, because every command that reads settings would wait for their compilation.

The module has no `from __future__ import annotations`, because `keys.py` reads annotations as objects.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, TypeAlias

OWN_TRAINER = "slurmddp.training.trainer.train"
KEEP_LAST = 3
"""Default number of newest checkpoints to keep, for the trainer and for `Distributon.save`."""
TargetNode: TypeAlias = Mapping[str, Any]
"""A mapping that describes an object: `_target_` is its import path, other keys are its arguments."""
NamedTargetNodes: TypeAlias = Mapping[str, TargetNode]
"""Any number of target nodes by name."""


class Identity(Enum):
    """The effect of a changed value of a key: another run with another name, or a change of the same run."""

    COMPUTED = "another run"
    """The key decides the computed numbers. It is part of the run's name and of the checkpoints' identity."""
    EXTENT = "another run, with checkpoints that fit"
    """The key sets a length or a size. It is part of the run's name, but a checkpoint fits any value."""
    FREE = "the same run"
    """The key changes no computed number. An existing run may change it."""
    FIXED = "only for a new run folder"
    """The key changes no computed number. It is read once, when the run folder is created."""


COMPUTED, EXTENT, FREE, FIXED = Identity


def key(default: Any, doc: str, identity: Identity = COMPUTED, **bounds: float) -> Any:
    """Declare a key of the configuration as a dataclass field.

    Args:
        default: the default value.
        doc: the meaning of the key, for help, messages and pages.
        identity: the effect of another value on a run.
        bounds: values for the fields `minimum`, `maximum`, `above` and `later` of `Key`.
    """
    facts = {"doc": doc, "identity": identity, **bounds}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=facts)
    return field(default=default, metadata=facts)


def section(doc: str, identity: Identity = COMPUTED, **facts: bool) -> Any:
    """Declare a section of keys as a dataclass field whose type is the dataclass of these keys.

    Args:
        doc: the meaning of the section.
        identity: the effect of another value on a run; COMPUTED leaves this to each key of the section.
        facts: values for the fields `trainer` and `is_open` of `Key`.
    """
    return field(metadata={"doc": doc, "identity": identity, **facts})


def group(
    choice: str | None, doc: str, identity: Identity = COMPUTED, *, trainer: bool = True, later: bool = False
) -> Any:
    """Declare a group as a dataclass field; the choices of a group are the files of a folder in `conf/`.

    Args:
        choice: the name of the default file; None if no file is chosen.
        doc: the meaning of the group.
        identity: the effect of another value on a run.
        trainer: whether only slurmddp's trainer reads the group.
        later: whether stored runs of earlier versions may lack the group.
    """
    facts = {"doc": doc, "identity": identity, "trainer": trainer, "choice": choice, "is_group": True}
    return field(metadata=facts | {"later": later})


@dataclass(init=False, repr=False, eq=False)
class ProgramSettings:
    """The keys of `program`. Other keys beside them are arguments of the function in `_target_`."""

    _target_: str = key(OWN_TRAINER, "import path of the function that every rank runs")
    script: str | None = key(
        None,
        "your own script (*.py), '-m package.module' or command, which every rank runs unchanged "
        "instead of the function",
    )
    args: Any | None = key(
        [],
        "arguments of the script, as a list or as in a shell; {run_dir} becomes the run folder and "
        "{attempt} the attempt's number",
    )
    resume_args: Any | None = key(
        [],
        "extra arguments of the script when the run resumes; if `checkpoints` is set, only once "
        "such a file exists",
        FREE,
    )
    free_args: Any | None = key(
        [],
        "extra arguments of the script that change no result, so that other values do not mean another run",
        FREE,
    )
    resumable: bool = key(
        False,
        "whether the script resumes by itself from its files, so that its ranks may restart within "
        "the job after a failure",
        FREE,
    )
    checkpoints: str | None = key(
        None,
        "path or glob of the files that your program saves; a newer file counts as progress of the run",
        FREE,
    )


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The keys of `train`: the settings of slurmddp's trainer."""

    steps: int = key(400, "number of optimizer steps of the run", EXTENT, minimum=1)
    max_time: int | str | None = key(
        None,
        "training time after which the run ends, over all attempts, written like time_limit; null "
        "means no limit",
        EXTENT,
        later=True,
    )
    batch_size: int = key(16, "samples per rank and batch; an upper limit if global_batch is set", minimum=1)
    accumulate: int = key(
        1,
        "batches per rank and optimizer step, whose gradients are added up; not used if global_batch is set",
        minimum=1,
    )
    global_batch: int | None = key(
        None,
        "samples per optimizer step over all ranks; null means batch_size times accumulate times "
        "the number of ranks",
        EXTENT,
        minimum=1,
    )
    clip_norm: float | None = key(
        1.0,
        "largest 2-norm of the whole gradient; a longer gradient is scaled down to it; null means "
        "no clipping",
        above=0,
    )
    precision: Literal["32", "bf16", "fp16"] = key(
        "32",
        "number format of the forward passes; bf16 and fp16 use autocast, and fp16 also scales the loss",
        later=True,
    )
    compile: bool = key(
        False, "whether the training steps run the model through torch.compile", EXTENT, later=True
    )
    ema: float | None = key(
        None,
        "decay of a moving average of the weights, such as 0.999, used for evaluation and export; "
        "null means no average",
        above=0,
        maximum=0.999999,
        later=True,
    )
    on_spike: Literal["fail", "skip", "rollback"] = key(
        "fail",
        "on NaN or infinity: fail, skip the update, or roll back to a checkpoint; rollback also "
        "reacts to loss spikes",
        FREE,
    )
    flops: bool = key(
        False,
        "whether to count the model's floating point operations once, and show TFLOP/s and MFU "
        "(the share of the GPU's peak)",
        FREE,
    )
    log_every: int = key(10, "optimizer steps between two lines of the log", FREE, minimum=1)
    eval_every: int = key(
        100,
        "optimizer steps between two evaluations; 0 means only before the first step and after the last",
        FREE,
        minimum=0,
    )
    eval_batches: int = key(
        20,
        "held-out batches of an evaluation, over all ranks together; 0 means no evaluation",
        EXTENT,
        minimum=0,
    )
    save_every: int = key(
        100,
        "optimizer steps between two checkpoints; 0 means only at the end and when the run stops",
        FREE,
        minimum=0,
    )
    memory_save_every: int | Literal["auto"] = key(
        "auto",
        "optimizer steps between two copies of the state in memory; auto spends at most 1 % of the "
        "time; 0 means no copies",
        FREE,
        minimum=0,
    )
    keep_last: int = key(KEEP_LAST, "number of newest checkpoints to keep", FREE, minimum=2)
    best: str | None = key(
        None,
        'metric whose best checkpoint is kept too: eval_loss, "max accuracy" or "min NAME"; null '
        "means only the newest are kept",
        FREE,
    )
    sample_chars: int = key(
        400,
        "characters of text that the model generates after the last step, if it can; 0 means none",
        FREE,
        minimum=0,
    )
    workers: int = key(
        0, "data loader processes per rank; 0 means that the rank loads its samples itself", FREE, minimum=0
    )


@dataclass(frozen=True, kw_only=True)
class PolicySettings:
    """The keys of `policy`: restarts, stops, time-outs and other reactions of a run."""

    max_restarts: int = key(
        3,
        "how often the job starts again after a failure; preemptions and time limits do not count",
        minimum=0,
    )
    max_restarts_in_place: int = key(
        10,
        "how often the ranks restart within the job after a failure, in one attempt; 0 means never",
        minimum=0,
    )
    max_requeues_without_progress: int = key(
        3, "time limits in a row that may pass without a newer checkpoint; one more ends the run", minimum=0
    )
    requeue: bool = key(True, "whether the job is requeued after a preemption or a time limit")
    signal_lead_s: int = key(120, "seconds before the time limit at which the ranks save and stop", minimum=1)
    grace_s: int | None = key(
        None,
        "seconds from SIGTERM to SIGKILL; null means SLURM's KillWait and GraceTime, and no limit "
        "in a local run",
        minimum=1,
    )
    exclude_failed_h: int = key(
        24,
        "hours for which later attempts avoid a failed node; your other runs avoid a lost node for one "
        "hour; 0 turns off both",
        minimum=0,
    )
    stall_timeout_s: float | None = key(
        None,
        "seconds without progress before a rank counts as hung; null means a limit from measured "
        "times, 0 means never",
        minimum=0,
    )
    join_timeout_s: float = key(
        300, "seconds for which the nodes of a job wait for each other at the start", minimum=1
    )
    rendezvous_timeout_s: float = key(
        60, "seconds for which the ranks wait for each other at the start", minimum=1
    )
    collective_timeout_s: float = key(
        1800, "seconds that a collective operation of the ranks may take", minimum=1
    )
    on_event: tuple[str, ...] = key(
        (),
        "command, as a list of words, that runs when the run starts, is requeued or ends; it gets "
        "the event as JSON on stdin",
    )


@dataclass(init=False, repr=False, eq=False)
class DdpSettings:
    """The keys of strategy=ddp: one replica per rank, whose gradients are averaged in every step."""

    name: Literal["ddp"] = key(
        "ddp", "name of the strategy; docs/guides/strategies.md compares all strategies"
    )
    find_unused_parameters: bool | None = key(
        None, "whether torch looks for parameters that a step does not use; null means false"
    )
    bucket_mb: float | None = key(None, "MiB of gradients per message; null means torch's default", above=0)
    static_graph: bool | None = key(
        None,
        "whether every step uses the same parameters in the same way, as torch's static_graph "
        "needs; null means false",
    )
    comm_hook: Literal["fp16", "bf16", "powersgd", "post_local_sgd"] | None = key(
        None,
        "how the ranks exchange gradients: fp16, bf16, powersgd or post_local_sgd; null means "
        "averages in float32",
    )
    hook_start_step: int | None = key(
        None,
        "number of steps before comm_hook takes effect; null means 1000 for powersgd, 100 for post_local_sgd",
        minimum=0,
    )
    powersgd_rank: int | None = key(
        None, "rank of the two matrices to which powersgd compresses a gradient; null means 1", minimum=1
    )
    average_every: int | None = key(
        None, "steps between two averages of the weights by post_local_sgd; null means 4", minimum=2
    )
    group_ranks: int | None = key(
        None,
        "number of ranks that average gradients in each step of post_local_sgd; null means the ranks "
        "of a node",
        minimum=1,
    )
    zero_optimizer: bool | None = key(
        None, "whether each rank keeps only a part of the optimizer's state (ZeRO stage 1); null means false"
    )


@dataclass(init=False, repr=False, eq=False)
class FsdpSettings:
    """The keys of strategy=fsdp: each rank keeps a shard of parameters, gradients and optimizer state."""

    name: Literal["fsdp"] = key(
        "fsdp", "each rank keeps a shard of parameters, gradients and optimizer state"
    )
    wrap: tuple[str, ...] | None = key(
        None,
        "classes of the modules that are gathered as one unit; null means the modules "
        "of each list whose modules have one class",
    )
    param_dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None,
        "number format of gathered parameters: float32, bfloat16 or float16; null means their own format",
    )
    reduce_dtype: Literal["float32", "bfloat16", "float16"] | None = key(
        None,
        "number format in which gradients are summed: float32, bfloat16 or float16; null means param_dtype",
    )
    reshard_after_forward: bool = key(
        True,
        "whether gathered parameters are freed after the forward pass: less memory, 1.5 times the messages",
    )
    activation_checkpointing: bool = key(
        False, "whether the backward pass computes activations again instead of keeping them"
    )


@dataclass(init=False, repr=False, eq=False)
class RingSettings:
    """The keys of strategy=ring: as ddp, but an algorithm of slurmddp.collectives averages the gradients."""

    name: Literal["ring"] = key("ring", "gradients are averaged by an algorithm of slurmddp.collectives")
    algorithm: Literal[
        "ring", "halving_doubling", "tree", "central_server", "sharded_server", "all_gather"
    ] = key(
        "ring",
        "algorithm by which the ranks of strategy=ring average gradients; docs/reference/collectives.md "
        "compares all algorithms",
    )
    find_unused_parameters: bool | None = key(
        None, "whether torch looks for parameters that a step does not use; null means false"
    )
    bucket_mb: float | None = key(None, "MiB of gradients per message; null means torch's default", above=0)


@dataclass(init=False, repr=False, eq=False)
class LocalSgdSettings:
    """The keys of strategy=local_sgd: ranks train alone, and every few steps they average their weights."""

    name: Literal["local_sgd"] = key("local_sgd", "the ranks average their weights every few steps")
    every: int = key(
        8,
        "steps between two averages of local_sgd (default 8) or two outer steps of diloco (default 50)",
        minimum=1,
    )
    warmup_steps: int = key(
        0, "number of first steps after each of which the ranks of local_sgd average their weights", minimum=0
    )


@dataclass(init=False, repr=False, eq=False)
class DiLoCoSettings:
    """The keys of strategy=diloco: each rank trains alone, and an outer optimizer steps for all ranks."""

    name: Literal["diloco"] = key("diloco", "an outer optimizer steps on the mean change of the weights")
    every: int = key(50, "steps between two steps of the outer optimizer", minimum=1)
    outer_lr: float = key(0.7, "learning rate of diloco's outer optimizer", above=0)
    outer_momentum: float = key(0.9, "Nesterov momentum of diloco's outer optimizer, below 1", minimum=0)


@dataclass(init=False, repr=False, eq=False)
class ParameterServerSettings:
    """The keys of strategy=parameter_server: ranks send gradients to rank 0, and get its weights."""

    name: Literal["parameter_server"] = key(
        "parameter_server", "a server on rank 0 owns the weights and the optimizer"
    )
    staleness: int = key(
        0, "steps by which a rank of parameter_server may be ahead of the slowest rank", minimum=0
    )


@dataclass(init=False, repr=False, eq=False)
class SingleSettings:
    """The keys of strategy=single, which allows only one rank."""

    name: Literal["single"] = key("single", "one rank trains alone")


@dataclass(init=False, repr=False, eq=False)
class DataParallelSettings:
    """The keys of strategy=data_parallel: one rank splits each batch over its GPUs."""

    name: Literal["data_parallel"] = key(
        "data_parallel", "one rank splits each batch over its GPUs; for comparison"
    )


StrategySettings: TypeAlias = (
    DdpSettings
    | RingSettings
    | FsdpSettings
    | LocalSgdSettings
    | DiLoCoSettings
    | ParameterServerSettings
    | SingleSettings
    | DataParallelSettings
)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The keys of `cluster`: the nodes of a site, and the options by which jobs request them."""

    name: str = key("unnamed", "name of the cluster, by default the name of its file")
    partition: str | None = key(None, "SLURM partition of the jobs; null leaves the option out")
    account: str | None = key(None, "account that pays for the jobs; null leaves the option out")
    qos: str | None = key(None, "quality of service of the jobs; null leaves the option out")
    constraint: str | None = key(None, "features that the nodes must have, as in sbatch --constraint")
    reservation: str | None = key(None, "reservation in which jobs run")
    gpus_per_node: int = key(0, "number of GPUs on each node", minimum=0)
    gpu_type: str | None = key(None, "type of the GPUs, such as a100, if the site requires it in a request")
    gpu_request: Literal["gpus-per-node", "gres", "none"] = key(
        "gpus-per-node", "option by which a job requests GPUs; none if GPUs come with the partition"
    )
    ranks_per_node: int | None = key(
        None, "number of ranks on each node if a job has no GPUs; null means 1", minimum=1
    )
    max_nodes: int | None = key(None, "largest number of nodes of one job; null means no limit", minimum=1)
    cpus_per_node: int | None = key(None, "number of CPUs on each node; null leaves it to SLURM", minimum=1)
    mem_gb: float | None = key(
        None, "host memory of each node in GiB; 0 requests all of it, null leaves it to SLURM", minimum=0
    )
    mem_request: Literal["mem", "mem-per-cpu", "mem-per-gpu", "none"] = key(
        "mem", "option by which a job requests memory; none if the site refuses such a request"
    )
    time_limit: int | str | None = key(
        None, "time limit of a job that sets no time_limit; null means the partition's default"
    )
    setup: tuple[str, ...] = key(
        (),
        "shell lines that each job runs before the training, such as module load or source venv/bin/activate",
    )
    env: Mapping[str, str] = key({}, "environment variables of the ranks, by name")
    sbatch: Mapping[str, str | int | bool] = key(
        {}, "other options of sbatch, by their long names; true means an option without a value"
    )
    srun: Mapping[str, str | int | bool] = key(
        {}, "other options of srun, by their long names; true means an option without a value"
    )
    python: str | None = key(
        None, "path of the Python interpreter on the nodes; null means the interpreter that submits"
    )
    stage: str | None = key(
        None,
        "folder on each node's own disk, such as /tmp, to which the Python environment is copied; "
        "null means no copy",
    )
    ssh: str | None = key(
        None, "login node from which jobs are submitted, by your own ssh; null means this machine"
    )
    ssh_folder: str | None = key(
        None, "folder of the project on the login node; null means slurmddp/PROJECT in your home folder"
    )


@dataclass(init=False, repr=False, eq=False)
class Config:
    """The keys of the top level: plain values, sections and groups of the whole configuration."""

    name: str | None = key(
        None, "first part of the run's name; null means the name of the model's class or of the script", FIXED
    )
    seed: int = key(0, "seed from which every random number follows", minimum=0, maximum=2**63 - 1)
    nodes: int | None = key(
        None,
        "number of nodes; null means the fewest nodes that have `gpus` GPUs, or 1 if `gpus` is not set",
        EXTENT,
        minimum=1,
    )
    gpus: int | None = key(
        None,
        "number of GPUs of the whole job, on the fewest nodes that have them; null means nodes times "
        "gpus_per_node",
        FREE,
        minimum=1,
    )
    spare_nodes: int = key(0, "number of extra nodes that wait and replace lost nodes", FREE, minimum=0)
    gpus_per_node: int | None = key(
        None,
        "number of GPUs on each node; null means all GPUs of a node of the cluster, or of this machine",
        FREE,
        minimum=0,
    )
    ranks_per_node: int | None = key(
        None,
        "number of ranks on each node; null means one per GPU; without GPUs, the cluster's number, "
        "or 2 on this machine",
        EXTENT,
        minimum=1,
    )
    cpus_per_node: int | None = key(
        None, "number of CPUs on each node; null means the cluster's cpus_per_node", FREE, minimum=1
    )
    mem_gb: float | None = key(
        None,
        "host memory of each node in GiB; null means the cluster's mem_gb, 0 means all of it",
        FREE,
        minimum=0,
    )
    time_limit: int | str | None = key(
        None,
        'time limit of the job: "HH:MM:SS", "D-HH:MM:SS", "90m", "2h" or a number of minutes; null '
        "means the cluster's time_limit",
        FREE,
    )
    partition: str | None = key(None, "SLURM partition; null means the cluster's partition", FREE)
    account: str | None = key(None, "account that pays for the job; null means the cluster's account", FREE)
    qos: str | None = key(None, "quality of service; null means the cluster's qos", FREE)
    ssh: str | None = key(
        None,
        "login node from which the job is submitted, by your own ssh; null means the cluster's ssh",
        FREE,
    )
    launcher: Literal["auto", "local", "slurm"] = key(
        "auto", "where the ranks run; auto means on SLURM if a cluster is chosen, else on this machine", FREE
    )
    submitter: Literal["sbatch", "submitit"] = key("sbatch", "program that submits a job", FREE)
    after: tuple[str, ...] = key((), "names of runs or sweeps that must finish before the job starts", FREE)
    array_parallelism: int | None = key(
        None,
        "largest number of a sweep's points that SLURM runs at the same time, but at least one of each job "
        "array; null means no limit",
        FREE,
        minimum=1,
    )
    runs_dir: str = key("runs", "folder that holds the run folders", FIXED)
    snapshot: bool = key(
        True, "whether the run folder keeps a copy of the project's code, which the ranks run", FIXED
    )
    backend: str = key(
        "auto",
        "transport between ranks: gloo, nccl, shm (one node), hierarchical, your package.module.Class, "
        "or cpu:gloo,cuda:nccl; auto means nccl on GPUs, else gloo",
        EXTENT,
        later=True,
    )
    elastic: bool = key(
        False,
        "whether the run continues with fewer nodes if a node is lost and no spare is left; each "
        "optimizer step keeps its samples",
        FREE,
    )
    preflight: bool = key(False, "whether all nodes are checked before the training starts", FREE)
    loggers: Any | None = key(
        "auto",
        "where metrics are written: tensorboard, csv, wandb, mlflow, or a list of these and mappings; auto "
        "means tensorboard if it is installed",
        FREE,
    )
    program: ProgramSettings = section("the program that every rank runs", is_open=True)
    train: TrainSettings = section("the training loop of slurmddp", trainer=True)
    policy: PolicySettings = section("reaction to stops and failures", FREE)
    model: TargetNode = group("gpt_small", "the model")
    data: TargetNode = group("stdlib", "the data set")
    loss: TargetNode | None = group(
        "token_cross_entropy", "the loss function; null means that the model returns its loss"
    )
    optimizer: TargetNode = group("adamw", "the optimizer")
    metrics: NamedTargetNodes | None = group(
        None, "extra metrics of the held-out data by name, each a function of outputs and targets", FREE
    )
    callbacks: NamedTargetNodes | None = group(
        None,
        "objects of your own by name, which the trainer calls at steps, evaluations and saves",
        later=True,
    )
    scheduler: TargetNode | None = group(
        "cosine", "the learning rate over the steps; null means a constant learning rate"
    )
    strategy: StrategySettings | TargetNode = group(
        "ddp", "how the replicas stay equal; a class of your own is given as package.Class"
    )
    cluster: Cluster | None = group(None, "the cluster, chosen with +cluster=NAME", FREE, trainer=False)
