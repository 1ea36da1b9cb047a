"""What every rank of a run does, from its environment to its exit code; the agent calls it."""

from __future__ import annotations

import logging
import os
import sys
import traceback

import torch

from slurmddp.checkpoint.config_match import computed
from slurmddp.environments.detect import detect, require
from slurmddp.errors import EXIT_FAILED, EXIT_FINISHED, ConfigError, SlurmddpError
from slurmddp.runs.folder import RunFolder
from slurmddp.strategies import build
from slurmddp.training.distributon import Distributon
from slurmddp.training.instantiate import instantiate, locate
from slurmddp.training.script import run_script
from slurmddp.training.signals import StopSignals

NOT_OPTIONS = ("_target_", "script", "args")
"""Keys of `program` that its function does not get."""


def main(run_dir: str) -> int:
    """Run the program of the run folder as the rank that the environment says; return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    folder = RunFolder(run_dir)
    try:
        program = folder.config().get("program") or {}
    except SlurmddpError as error:
        return _report(error)
    if program.get("script"):
        # It says itself when it can be stopped, so no handlers are put in place for it.
        run_script(folder, program["script"], program.get("args") or [])
        return EXIT_FINISHED
    with StopSignals() as signals:
        try:
            _run(folder, signals)
        except SlurmddpError as error:
            return _report(error)
        except Exception:
            traceback.print_exc()
            return EXIT_FAILED
    return EXIT_FINISHED


def _run(folder: RunFolder, signals: StopSignals) -> None:
    config = folder.config()
    info = detect(os.environ)
    require(
        info,
        nodes=config.get("nodes"),
        ranks_per_node=config.get("ranks_per_node"),
        gpus_per_node=config.get("gpus_per_node"),
        visible_gpus=torch.cuda.device_count() or None,
    )
    strategy = build(**config.get("strategy", {"name": "ddp"}))
    program = config.get("program") or {}
    if "_target_" not in program:
        raise ConfigError("program has no _target_.", hint="Name the function to run, or leave program out.")
    target = locate(program["_target_"], key="program._target_")
    options = {k: instantiate(v, _key_=f"program.{k}") for k, v in program.items() if k not in NOT_OPTIONS}
    with Distributon(
        strategy=strategy, seed=config.get("seed"), config=computed(config), stop_signals=signals
    ) as distributon:
        distributon.launch()
        target(distributon, config, folder, **options)


def _report(error: SlurmddpError) -> int:
    """Say what is wrong; what lies behind it comes first, so that the last lines are the message."""
    if error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
    print(f"{type(error).__name__}: {error.message}\n{error.hint}".rstrip(), file=sys.stderr, flush=True)
    return error.exit_code
