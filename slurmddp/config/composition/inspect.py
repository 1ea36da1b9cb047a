"""Show how Hydra composes a configuration: Hydra's own keys, its search path, its tree of defaults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from slurmddp.config.composition import hydra_errors
from slurmddp.config.composition.compose import COMPOSITION_ERRORS, initialized, make_plan, with_hydra
from slurmddp.config.composition.sources import Sources
from slurmddp.settings.arguments import spelled


def hydra_node(overrides: Sequence[str], project_dir: Path, sources: Sources) -> Any:
    """Return Hydra's own configuration for a command line as plain values, with unresolved references."""
    plan = make_plan(overrides, project_dir, sources)
    try:
        return OmegaConf.to_container(with_hydra(plan)["hydra"], resolve=False, enum_to_str=True)
    except COMPOSITION_ERRORS as error:
        raise hydra_errors.explain(error, overrides, plan.roots) from error


def show_info(info: str, overrides: Sequence[str], project_dir: Path, sources: Sources) -> None:
    """Print Hydra's report for its flag `--info`; `info` is the value of the flag."""
    plan = make_plan(overrides, project_dir, sources)
    arguments = [f"++{key}={spelled(value)}" for key, value in plan.arguments.items()]
    try:
        with initialized(plan) as name:
            hydra = GlobalHydra.instance().hydra
            if hydra is not None:
                hydra.show_info(info, name, [*plan.overrides, *arguments])
    except COMPOSITION_ERRORS as error:
        raise hydra_errors.explain(error, overrides, plan.roots) from error
