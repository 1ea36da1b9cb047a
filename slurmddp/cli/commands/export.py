"""Write the weights of a run to a plain safetensors file.

slurmddp export first                                     from the newest undamaged checkpoint
slurmddp export first --step 200 --output w.safetensors   from the checkpoint of step 200
slurmddp export first --best                              from the best checkpoint, by train.best of the run
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slurmddp.checkpoint.files.export import AVERAGED
from slurmddp.checkpoint.files.space import size_text
from slurmddp.cli.json_output import add_json, print_json
from slurmddp.cli.run_argument import add_run
from slurmddp.control.export import export
from slurmddp.errors import EXIT_FINISHED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of `slurmddp export`."""
    add_run(parser, is_required=False)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--step", type=int, metavar="N", help="step of the checkpoint (default: the newest undamaged one)"
    )
    chosen.add_argument(
        "--best",
        nargs="?",
        const="",
        metavar="METRIC",
        help='use the best undamaged checkpoint, by METRIC ("max accuracy") or by train.best of the run',
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write (default: RUN-step-N.safetensors in this folder)",
    )
    parser.add_argument(
        "--object",
        metavar="NAME",
        help="model to write, if the checkpoint holds several (default: ema, the averaged weights of "
        "train.ema, or else model)",
    )
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Write the weights of a model to a file, and print the path of the file; return the exit code."""
    result = export(
        args.run, step=args.step, best=args.best, output=args.output, model=args.object, force=args.force
    )
    if args.json:
        print_json(result)
        return EXIT_FINISHED
    if result.damaged is not None:
        print(
            f"{result.damaged.name} is damaged; {result.checkpoint.name} was exported instead.",
            file=sys.stderr,
        )

    print(result.path)
    averaged = " (averaged weights; `--object model` exports the others)" if result.model == AVERAGED else ""
    size = size_text(result.size_bytes)
    print(f"{result.tensors} tensors, {size}, from step {result.step}{averaged}", file=sys.stderr)

    return EXIT_FINISHED
