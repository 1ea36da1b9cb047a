"""Seed, save and restore every random generator of a training: python, torch and NumPy."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from slurmddp.errors import CheckpointError

log = logging.getLogger(__name__)


def derive(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed: a hash (BLAKE2b, RFC 7693) of `seed` and all `parts`, equal on any machine."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed the global random generators of python, torch (CPU and GPU) and NumPy."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


def seed_sample(seed: int) -> None:
    """Seed the global generators of python, torch (CPU only) and NumPy, in a few microseconds."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def preserved() -> Iterator[None]:
    """Return a context that restores the global CPU generators at its end."""
    states = cpu_states()
    try:
        yield
    finally:
        restore_cpu(states)


def cpu_states() -> tuple[Any, ...]:
    """Return the states of the CPU generators of python, torch and NumPy, for `restore_cpu`.

    Unlike `capture`, this is fast, but the states can't be stored in a checkpoint.
    """
    return random.getstate(), torch.get_rng_state(), np.random.get_state()


def restore_cpu(states: tuple[Any, ...]) -> None:
    """Set the CPU generators to a result of `cpu_states`."""
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    np.random.set_state(states[2])


def capture() -> dict[str, Any]:
    """Return the states of all global generators, as tensors and plain values for a checkpoint.

    The state of CUDA is included if this process has used CUDA.
    """
    version, integers, gauss = random.getstate()
    tensor = torch.tensor(integers, dtype=torch.int64, device="cpu")
    state: dict[str, Any] = {
        "python": {"version": version, "words": tensor, "gauss": gauss},
        "torch": torch.get_rng_state(),
        "numpy": _to_tensors(np.random.get_state(legacy=False)),
    }

    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Set all global generators to a result of `capture`.

    Raises:
        CheckpointError: these versions of python, torch and NumPy can't use `state`.
    """
    try:
        python = state["python"]
        random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
        torch.set_rng_state(state["torch"])
        np.random.set_state(_to_arrays(state["numpy"]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"The random state in the checkpoint can't be restored: {type(error).__name__}: {error}.",
            hint="Load it with the versions of Python, NumPy and torch that wrote the checkpoint.",
        ) from error

    if "cuda" in state:
        _restore_cuda(state["cuda"])


def _restore_cuda(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        log.warning(
            "The checkpoint has a CUDA random state, which is ignored, because this process has no GPU."
        )


def _to_tensors(value: Any) -> Any:
    """Return NumPy's nested state with tensors of bytes for its arrays, and Python's numbers for NumPy's.

    Bytes are used because older versions of safetensors have no type for unsigned integers of 32 bits.
    """
    if isinstance(value, dict):
        return {key: _to_tensors(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "bytes": torch.from_numpy(value.copy().view(np.uint8))}
    if isinstance(value, np.generic):
        return value.item()

    return value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"dtype", "bytes"}:
        return value["bytes"].numpy().view(value["dtype"])
    if isinstance(value, dict):
        return {key: _to_arrays(item) for key, item in value.items()}
    return value
