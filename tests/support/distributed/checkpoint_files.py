"""Checkpoints for tests: small saves, damage, and a comparison down to bits and types."""

import struct

import torch

from slurmddp.checkpoint import state as checkpoint
from slurmddp.checkpoint.files.manifest import checkpoint_folders


def save(root, step, state=None, keep_last=3, **meta):
    return checkpoint.write(root, step, state or {"step": step}, meta=meta, keep_last=keep_last)


def round_trip(tmp_path, state):
    return checkpoint.read(save(tmp_path / "root", 1, state)).state


def flip_bit(path, position=None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if position is None else position] ^= 0x10
    path.write_bytes(data)


def steps_in(root):
    return [int(path.name[5:]) for path in checkpoint_folders(root)]


def hidden_in(root):
    return [path.name for path in root.iterdir() if path.name.startswith(".")]


def newest_copy(buffers, root):
    """Return descriptor and header of the newest state in memory, or None."""
    states = [(header.order, descriptor, header) for descriptor, header, _ in buffers.states(root)]
    return max(states)[1:] if states else None


def same(left, right):
    """Return whether two nested values are equal in values and types; tensors must have equal bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and bits(left) == bits(right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(
            type(a) is type(b) and same(left[a], right[b]) for a, b in zip(left, right, strict=True)
        )

    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)

    return bool(left == right)


def bits(tensor):
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    return bytes(flat.view(torch.uint8).tolist())
