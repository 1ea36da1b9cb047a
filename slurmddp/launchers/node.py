"""What the agent does to itself before it forks: all that its ranks inherit, paid for once per node."""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from slurmddp.errors import ConfigError
from slurmddp.runs.folder import RunFolder

PRELOAD = (
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.optim",
    "torch.utils.data",
    # DistributedDataParallel imports it with the first model: 800 modules, as slow as torch itself.
    "torch._dynamo",
    "torch.profiler._cupti_monitor",
    "numpy",
    "safetensors.torch",
    "slurmddp.training.*",
)


def enter_project(folder: RunFolder, project_dir: str | None) -> None:
    """Stand where the person stood, and import their modules as they were at submission."""
    project = Path(project_dir or Path.cwd())
    try:
        os.chdir(project)
    except OSError as error:
        raise ConfigError(
            f"The project folder {project} can't be entered on {socket.gethostname()}: {error.strerror}.",
            hint="It must be on a filesystem that the compute nodes share.",
        ) from error
    # `python -m` put the folder of its start in the first place.
    sys.path[0] = str(folder.code_dir if folder.code_dir.is_dir() else project)


def import_for_all(names: Sequence[str]) -> None:
    """Import modules by name for every rank to share; raises ConfigError if one of them touched CUDA."""
    gc.disable()  # Almost all that an import makes stays; looking for garbage takes a fifth of the time.
    try:
        import_all(names)
    finally:
        gc.enable()
    gc.freeze()  # No collection in a rank will look at, and so copy, what is shared now.
    refuse_cuda(sys.modules.get("torch"))


def import_all(names: Sequence[str]) -> None:
    """Import modules by name; `package.*` stands for every module of the package."""
    for name in names:
        package, star, _ = name.partition(".*")
        try:
            module = importlib.import_module(package)
        except ModuleNotFoundError as error:
            _tolerate_missing(error, package)
            continue
        if star:
            import_all([f"{package}.{entry.name}" for entry in pkgutil.iter_modules(module.__path__)])


def _tolerate_missing(error: ModuleNotFoundError, name: str) -> None:
    """Raise unless what is missing is a part of torch that only some versions have."""
    if error.name == name and name.count(".") > 0 and not name.startswith("slurmddp"):
        return
    raise ConfigError(
        f"The module {error.name} can't be imported by {sys.executable} on {socket.gethostname()}.",
        hint="Install it there, or name another interpreter with cluster.python.",
    ) from error


def refuse_cuda(torch: ModuleType | None) -> None:
    """Raise if an import has touched CUDA: a forked rank could not use it any more."""
    if torch is not None and torch.cuda.is_initialized():
        raise ConfigError(
            "CUDA was initialised in the agent while modules were imported, so the ranks can't be forked.",
            hint="Move code that touches the GPU out of module level, into a function.",
        )
