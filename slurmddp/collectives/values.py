"""Exchange values other than gradients between ranks; on a single rank, functions return the rank's value.

Values travel as JSON and raw tensors. Received bytes are never unpickled, because a pickle from a foreign
process could run that process's code.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import distributed

from slurmddp import errors
from slurmddp.checkpoint.state.safetensors_stream import Bytes, decode, encode
from slurmddp.checkpoint.state.state_tree import flatten, unflatten
from slurmddp.errors import CheckpointError, ConfigError, SlurmddpError
from slurmddp.near_matches import near_matches

T = TypeVar("T")
OPERATIONS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "product": torch.mul,
    "max": torch.maximum,
    "min": torch.minimum,
}
"""By name of an operation, the function that combines two tensors. For "mean", `reduce` divides the sum."""
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex64,
    torch.complex64: torch.complex128,
}
"""By dtype of a tensor, the dtype in which `reduce` sums for a mean. Its range is larger, so no sum
overflows."""
_LENGTH_BYTES = 8
_CHUNK_BYTES = 64 << 20
_HAS_ERROR = -1
"""The number that a rank sends in place of the size of its value, if it has an error and no value."""


def rank() -> int:
    return distributed.get_rank() if distributed.is_initialized() else 0


def world_size() -> int:
    return distributed.get_world_size() if distributed.is_initialized() else 1


def gather(value: T, error: Exception | None = None) -> list[T]:
    """Return every rank's `value`, in the order of ranks, on every rank.

    Args:
        value: plain values, tensors, and lists, tuples and dicts of them, as in a checkpoint. Other values
            raise an error, even if there is only one rank.
        error: an error of this rank, or None. If any rank has an error, every rank raises one: its own error,
            or else the error of the lowest rank that has one.
    """
    if error is None and world_size() == 1:
        flatten({"value": value})
        return [value]

    packed, error = _packed(value, error)
    message = packed if error is None else pack({"error": _describe(error)})
    # A rank with an error takes part in the collective as well: the other ranks would wait for it.
    messages = [unpack(received) for received in _all_gather(message)] if world_size() > 1 else []
    if error is not None:
        raise error

    for content in messages:
        if "error" in content:
            raise _rebuild(content["error"])

    return [content["value"] for content in messages]


def gather_to_zero(value: T) -> list[T] | None:
    """Return every rank's `value` (see `gather`), in the order of ranks, on rank 0, and None elsewhere."""
    if world_size() == 1:
        return [value]

    packed, error = _packed(value)
    sizes = _agreed_sizes(packed, error)
    part = _as_tensor(packed, max(sizes))
    parts = [torch.empty_like(part) for _ in sizes] if rank() == 0 else None
    distributed.gather(part, parts, dst=0)
    if parts is None:
        return None

    return [unpack(_as_bytes(part, size))["value"] for part, size in zip(parts, sizes, strict=True)]


def from_zero(value: T) -> T:
    """Return rank 0's `value` (see `gather`) on every rank."""
    if world_size() == 1:
        flatten({"value": value})
        return value

    packed, error = _packed(value) if rank() == 0 else (b"", None)
    size = _agreed_sizes(packed, error)[0]
    received = _as_tensor(packed, size)
    distributed.broadcast(received, src=0)
    shared: T = unpack(_as_bytes(received, size))["value"]

    return shared


def on_zero(action: Callable[[], T]) -> T:
    """Run `action` on rank 0; return its result, or raise its error, on every rank."""
    result: Any = None
    with agreed():
        if rank() == 0:
            result = action()

    shared: T = from_zero(result)
    return shared


def broadcast_bytes(data: torch.Tensor, source: int) -> None:
    """Replace the bytes in `data` by those of rank `source`.

    Args:
        data: a tensor of uint8 on the CPU, of the same size on all ranks.
        source: the rank that sends.
    """
    for chunk in data.split(_CHUNK_BYTES):  # type: ignore[no-untyped-call]
        sent = chunk.to(_device())
        distributed.broadcast(sent, src=source)
        chunk.copy_(sent)


def pack(value: Any) -> bytes:
    """Return a value as bytes: its structure and plain values as JSON, then its tensors as safetensors.

    Raises:
        CheckpointError: the value holds a type that a checkpoint can't store.
    """
    flat = flatten({"": value})
    tree = json.dumps(flat.tree, separators=(",", ":")).encode()
    tensors = encode(flat.tensors) if flat.tensors else ()

    return b"".join([len(tree).to_bytes(_LENGTH_BYTES, "big"), tree, *tensors])


def unpack(packed: bytes) -> Any:
    """Return the value that `pack` has turned into bytes, with its tensors on the CPU.

    Raises:
        CheckpointError: the bytes are damaged.
    """
    view = memoryview(packed)
    end = _LENGTH_BYTES + int.from_bytes(view[:_LENGTH_BYTES], "big")
    try:
        tree = json.loads(bytes(view[_LENGTH_BYTES:end]))
        tensors = decode(Bytes(view[end:]), len(view) - end) if end < len(view) else {}
        return unflatten(tree, tensors)[""]
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"The bytes of a value from another rank are damaged: {error}.") from error


def _packed(value: Any, error: Exception | None = None) -> tuple[bytes, Exception | None]:
    """Return the bytes of a value and None, or no bytes and the error of this rank.

    The error is the argument `error`, or else the reason why the value can't be packed.
    """
    if error is not None:
        return b"", error

    try:
        return pack({"value": value}), None
    except SlurmddpError as caught:
        return b"", caught


def _all_gather(data: bytes) -> list[bytes]:
    sizes = _sizes(len(data))
    part = _as_tensor(data, max(sizes))
    parts = [torch.empty_like(part) for _ in sizes]
    distributed.all_gather(parts, part)

    return [_as_bytes(part, size) for part, size in zip(parts, sizes, strict=True)]


def _agreed_sizes(packed: bytes, error: Exception | None) -> list[int]:
    """Return the number of bytes that each rank will send, on every rank.

    If any rank has an error, every rank raises (see `gather`).
    """
    sizes = _sizes(len(packed) if error is None else _HAS_ERROR)
    if _HAS_ERROR in sizes:
        gather(None, error)
    return sizes


def _sizes(size: int) -> list[int]:
    part = torch.tensor([size], dtype=torch.int64, device=_device())
    parts = [torch.empty_like(part) for _ in range(world_size())]
    distributed.all_gather(parts, part)

    return [int(part) for part in parts]


def _device() -> torch.device:
    """Return the device of the tensors to exchange: the CPU if the group has a CPU backend, else the GPU."""
    if "cpu:" in distributed.get_backend_config() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _as_tensor(data: bytes, size: int) -> torch.Tensor:
    """Return `data`, padded with zeros to `size` bytes, as a tensor of uint8 on `_device()`."""
    tensor = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if data:
        tensor[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor.to(_device())


def _as_bytes(tensor: torch.Tensor, size: int) -> bytes:
    return tensor[:size].cpu().numpy().tobytes()


def share(tensors: Iterable[torch.Tensor]) -> None:
    """Copy rank 0's tensors into the tensors of all other ranks, which have the same shapes."""
    if not distributed.is_initialized():
        return

    with torch.no_grad():
        for tensor in tensors:
            shared = tensor.contiguous()
            distributed.broadcast(shared, src=0)
            if shared is not tensor and not torch.equal(shared, tensor):
                tensor.copy_(shared)


def reduce(tensor: torch.Tensor, operation: str, device: torch.device) -> torch.Tensor:
    """Return `tensor` reduced over the ranks, always in the order of ranks.

    In an all-reduce, the order of summation depends on the size of the tensor. Here a value gets the same
    bits whether it is reduced alone or with other values. This needs memory for one copy of the tensor per
    rank.

    Args:
        tensor: a tensor of the same shape and dtype on all ranks.
        operation: a key of `OPERATIONS`.
        device: the device on which the backend exchanges tensors.

    Returns:
        A tensor of the shape, dtype and device of `tensor`.

    Raises:
        ConfigError: there is no such operation, or it is not defined for the dtype: `mean` for integers,
            `max` and `min` for complex numbers.
    """
    if operation not in OPERATIONS:
        raise ConfigError(
            f"There is no operation {operation!r}.", hint=near_matches(str(operation), OPERATIONS)
        )

    if operation == "mean" and not (tensor.is_floating_point() or tensor.is_complex()):
        raise ConfigError(
            f"The mean over ranks is not defined for a tensor of {tensor.dtype}.",
            hint='Pass tensor.float(), or use the operation "sum".',
        )

    if operation in ("max", "min") and tensor.is_complex():
        raise ConfigError(
            f'The "{operation}" over ranks is not defined for a tensor of {tensor.dtype}.',
            hint="Complex numbers have no order. Pass tensor.abs(), or the real and imaginary parts.",
        )

    if not distributed.is_initialized():
        return tensor.detach().clone()

    part = tensor.detach().to(device).contiguous()
    parts = [torch.empty_like(part) for _ in range(world_size())]
    distributed.all_gather(parts, part)
    if operation == "mean":
        # Sum in a dtype with a larger range: in the tensor's own dtype the sum may be infinite although the
        # mean is not.
        parts = [part.to(_WIDER.get(part.dtype, part.dtype)) for part in parts]

    total = parts[0]
    for part in parts[1:]:
        total = OPERATIONS[operation](total, part)

    if operation == "mean":
        total = total / len(parts)

    return total.to(tensor.device, tensor.dtype)


@contextmanager
def agreed() -> Iterator[None]:
    """Run the block on every rank; if it fails on any rank, raise on every rank (see `gather`)."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught

    gather(None, error)


def _describe(error: Exception) -> dict[str, str | int]:
    """Return class, text, hint and exit code of an error; the text names this rank and host."""
    where = f"Rank {rank()} on {socket.gethostname()}"
    if not isinstance(error, SlurmddpError):
        text = f"{where} failed with {type(error).__name__}: {error}."
        return {"kind": SlurmddpError.__name__, "text": text, "hint": "", "code": SlurmddpError.exit_code}

    kind = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
    return {"kind": kind, "text": f"{where}: {error.message}", "hint": error.hint, "code": error.exit_code}


def _rebuild(failure: Mapping[str, Any]) -> SlurmddpError:
    """Return the error that another rank has sent, from the result of `_describe`."""
    kind = getattr(errors, str(failure["kind"]), SlurmddpError)
    if not (isinstance(kind, type) and issubclass(kind, SlurmddpError)):
        kind = SlurmddpError

    error = kind(str(failure["text"]), hint=str(failure["hint"]))
    error.exit_code = int(failure["code"])

    return error
