"""Write the weights of a run to a plain safetensors file.

slurmddp export first                          the newest undamaged checkpoint
slurmddp export first --step 200 --output w.safetensors
slurmddp export first --best                   the best one by train.best of the run
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurmddp.checkpoint.files.export import AVERAGED, export_weights
from slurmddp.checkpoint.files.listing import best_of_run, best_whole, find_root, newest_whole
from slurmddp.checkpoint.files.manifest import checkpoint_folders, step_of
from slurmddp.checkpoint.files.space import size_text
from slurmddp.errors import CheckpointError, ConfigError
from slurmddp.spec import parse_best


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp export`."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="name, its beginning, or folder (default: the newest run)"
    )
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--step", type=int, metavar="N", help="step of the checkpoint (default: the newest undamaged one)"
    )
    chosen.add_argument(
        "--best",
        nargs="?",
        const="",
        metavar="METRIC",
        help='the best undamaged checkpoint, by train.best of the run or as given: "max accuracy"',
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write (default: RUN-step-N.safetensors in this folder)",
    )
    parser.add_argument(
        "--object",
        metavar="NAME",
        help="the model to write, if several were saved (default: ema, the averaged weights of train.ema, "
        "else model)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")


def run(args: argparse.Namespace) -> int:
    """Write the tensors of the model to a file, and print the path."""
    root = find_root(args.run)
    folder = _choose(root, args.step) if args.best is None else _best(root, args.best)
    step = step_of(folder)
    owner = root.parent.name if root.name == "checkpoints" else root.name
    output: Path = args.output or Path(f"{owner}-step-{step}.safetensors")
    try:
        model, names = export_weights(folder, output, model=args.object, force=args.force)
    except CheckpointError as problem:
        raise CheckpointError(f"Checkpoint {folder}: {problem.message}", hint=problem.hint) from problem
    except OSError as error:
        raise CheckpointError(f"{folder} can't be read: {error.strerror or error}.") from error
    print(output)
    averaged = " (averaged weights; --object model writes the others)" if model == AVERAGED else ""
    size = size_text(output.stat().st_size)
    print(f"{len(names)} tensors, {size}, of step {step}{averaged}", file=sys.stderr)
    return 0


def _best(root: Path, text: str) -> Path:
    by = parse_best(text) if text else best_of_run(root)
    if by is None:
        raise ConfigError(
            f"The run of {root} has no `train.best`.", hint='Name the metric: --best "min eval_loss".'
        )
    if (folder := best_whole(root, by)) is None:
        raise CheckpointError(
            f"No undamaged checkpoint in {root} has the metric {by[0]}.",
            hint="`slurmddp checkpoints RUN --json` shows the metrics of each.",
        )
    return folder


def _choose(root: Path, step: int | None) -> Path:
    folders = checkpoint_folders(root)
    if not folders:
        raise CheckpointError(f"There are no checkpoints in {root}.", hint="The run has not saved one yet.")
    if step is not None:
        for folder in folders:
            if step_of(folder) == step:
                return folder
        there = ", ".join(str(step_of(folder)) for folder in folders)
        raise ConfigError(f"There is no checkpoint of step {step}.", hint=f"There are: {there}.")
    newest = newest_whole(root)
    if newest is None:
        raise CheckpointError(
            f"None of the {len(folders)} checkpoints in {root} verifies.",
            hint="`slurmddp checkpoints RUN --verify` shows the damage of each.",
        )
    if newest != folders[0]:
        print(f"{folders[0].name} is damaged; {newest.name} is used instead.", file=sys.stderr)
    return newest
