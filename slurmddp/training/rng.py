"""Seeds and states of every random generator that training uses, as tensors and plain values."""

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
    """Return a 63-bit seed that depends on all of `seed` and `parts`; the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed python, torch (CPU and GPU) and NumPy."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


def seed_sample(seed: int) -> None:
    """Seed the CPU generators as `seed_everything` does, in the microseconds that a single sample allows."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def aside() -> Iterator[None]:
    """Leave the CPU generators as they are now, whatever is drawn inside."""
    kept = keep()
    try:
        yield
    finally:
        put_back(kept)


def keep() -> tuple[Any, ...]:
    """Return the state of the CPU generators, quickly, for `put_back` in this process."""
    return random.getstate(), torch.get_rng_state(), np.random.get_state()


def put_back(kept: tuple[Any, ...]) -> None:
    random.setstate(kept[0])
    torch.set_rng_state(kept[1])
    np.random.set_state(kept[2])


def capture() -> dict[str, Any]:
    """Return the state of all generators of this process; CUDA only where this process uses it."""
    state: dict[str, Any] = {"python": _capture_python(), "torch": torch.get_rng_state()}
    state["numpy"] = _to_tensors(np.random.get_state(legacy=False))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Set all generators to a captured state; raises CheckpointError when `state` is none."""
    try:
        version, words, gauss = (state["python"][key] for key in ("version", "words", "gauss"))
        random.setstate((version, tuple(words.tolist()), gauss))
        torch.set_rng_state(state["torch"])
        np.random.set_state(_to_arrays(state["numpy"]))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"The random state in the checkpoint can't be restored: {type(error).__name__}: {error}.",
            hint="It was written by another version of Python, NumPy or torch, or by other code.",
        ) from error
    if "cuda" in state:
        _restore_cuda(state["cuda"])


def _capture_python() -> dict[str, Any]:
    version, words, gauss = random.getstate()
    return {"version": version, "words": torch.tensor(words, dtype=torch.int64, device="cpu"), "gauss": gauss}


def _restore_cuda(state: torch.Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(state)
    else:
        log.warning("The checkpoint holds a CUDA random state and there is no GPU here; it is left out.")


def _to_tensors(value: Any) -> Any:
    """Make NumPy's nested generator state storable: arrays to bytes, NumPy numbers to Python's.

    Bytes, because older versions of the safetensors format have no name for unsigned words.
    """
    if isinstance(value, dict):
        return {key: _to_tensors(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": str(value.dtype), "bytes": torch.from_numpy(value.copy().view(np.uint8))}
    return value.item() if isinstance(value, np.generic) else value


def _to_arrays(value: Any) -> Any:
    if isinstance(value, dict) and value.keys() == {"dtype", "bytes"}:
        return value["bytes"].numpy().view(value["dtype"])
    if isinstance(value, dict):
        return {key: _to_arrays(item) for key, item in value.items()}
    return value
