"""Train PyTorch models on a SLURM cluster as easily as on a laptop.

The names in `__all__` are imported at their first use, so that `import slurmddp` and the command line never
import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Distributon", "Run", "SlurmddpError", "__version__", "map_array", "submit", "train"]

if TYPE_CHECKING:
    from slurmddp.errors import SlurmddpError as SlurmddpError
    from slurmddp.run_handle import Run as Run
    from slurmddp.start_from_python import map_array as map_array
    from slurmddp.start_from_python import submit as submit
    from slurmddp.start_from_python import train as train
    from slurmddp.training.distributon import Distributon as Distributon

_LAZY = {
    "Distributon": "slurmddp.training.distributon",
    "Run": "slurmddp.run_handle",
    "SlurmddpError": "slurmddp.errors",
    "map_array": "slurmddp.start_from_python",
    "submit": "slurmddp.start_from_python",
    "train": "slurmddp.start_from_python",
}


def __getattr__(name: str) -> Any:
    if name == "Distribution":
        # An AttributeError would not do: for `from slurmddp import Distribution`, Python replaces it by an
        # ImportError with its own text, without this advice.
        raise ImportError("slurmddp has no 'Distribution': its class is spelled Distributon.")
    if name not in _LAZY:
        raise AttributeError(f"module 'slurmddp' has no attribute {name!r}")

    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
