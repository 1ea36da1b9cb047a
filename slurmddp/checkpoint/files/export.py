"""Copy a model's weights from a checkpoint into a plain safetensors file, byte by byte, without torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from slurmddp.checkpoint.files import space
from slurmddp.checkpoint.files.digest import CHUNK_BYTES
from slurmddp.checkpoint.files.durable import sync_folder
from slurmddp.checkpoint.files.manifest import TENSORS_FILE, TREE_FILE, require_state, verify
from slurmddp.errors import CheckpointError, ConfigError, SlurmddpError
from slurmddp.host.atomic_file import replacing
from slurmddp.near_matches import near_matches

_NAMES = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint16": "U16", "uint32": "U32",
          "uint64": "U64", "complex64": "C64"}  # fmt: skip
"""Safetensors' names of the types that checkpoints store as bytes: older safetensors releases lack them."""
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2,
           "I16": 2, "U16": 2}  # fmt: skip
"""Size in bytes of an element of each type; the elements of all other types have 1 byte."""
AVERAGED = "ema"
"""The name of the model with averaged weights, which `train.ema` saves beside "model"."""
_COMPILED = "_orig_mod."
"""The prefix of torch.compile in tensor names; `Distributon.save` removes the prefix of DDP."""

Entry = dict[str, Any]
"""Type, shape and position of a tensor in a safetensors header."""


def export_weights(folder: Path, output: Path, *, model: str | None, force: bool) -> tuple[str, list[str]]:
    """Write the weights of a model in a checkpoint to a safetensors file.

    Args:
        folder: the folder of the checkpoint.
        output: the safetensors file to write.
        model: name of the model among the saved objects. None: "ema" if it has the same tensor names as
            "model", else "model", else the only model.
        force: whether to replace an existing file.

    Returns:
        The name of the exported model, and the names of its tensors in its state_dict.

    Raises:
        CheckpointError: the checkpoint does not verify, or a tensor has a type that safetensors lacks.
        ConfigError: the checkpoint has no such model, or `output` exists and `force` is False.
        SlurmddpError: `output` could not be written.
    """
    if output.is_dir() or (output.exists() and not force):
        raise ConfigError(
            f"{output} exists already.", hint="Give another --output, or --force to replace a file."
        )

    manifest = verify(folder)
    require_state(manifest)
    content = json.loads((folder / TREE_FILE).read_text(encoding="utf-8"))
    model, stored_names = _names_of(folder, content["state"], model)

    with ExitStack() as stack:
        # Sorted by name, the shard files are in the order of the ranks, and so of a sharded tensor's rows.
        shard_files = sorted(name for name in manifest.files if name not in (TENSORS_FILE, TREE_FILE))
        files = [TENSORS_FILE, *shard_files]
        sources = [_Source(stack.enter_context((folder / name).open("rb"))) for name in files]
        tensors = {name: _tensor(name, stored, sources) for name, stored in stored_names.items()}
        _write(output, tensors)

    return model, list(stored_names)


def _names_of(folder: Path, tree: Any, model: str | None) -> tuple[str, dict[str, str]]:
    """Choose the model to export, as in `export_weights`.

    Args:
        folder: the folder of the checkpoint, for the error.
        tree: the content of the tree file.
        model: name of a saved object, or None.

    Returns:
        The name of the model, and a dict from each tensor's name in its state_dict to the tensor's name in
        the checkpoint's files.

    Raises:
        ConfigError: the checkpoint has no such model.
    """
    objects = {str(name): value for name, value in _pairs(dict(_pairs(tree)).get("objects"))}
    tensors = {name: _tensors_in(value) for name, value in objects.items()}
    models = {name: names for name, names in tensors.items() if names}

    if model is None and AVERAGED in models and models[AVERAGED].keys() == models.get("model", {}).keys():
        model = AVERAGED
    if model is None:
        model = "model"
        if model not in models and len(models) == 1:
            model = next(iter(models))

    if model not in models:
        raise ConfigError(
            f"The checkpoint {folder.name} contains no model named {model!r}.",
            hint=f"Choose a model with --object. {near_matches(model, models)}".strip(),
        )

    return model, {name.replace(_COMPILED, ""): stored for name, stored in models[model].items()}


def _pairs(tree: Any) -> list[tuple[Any, Any]]:
    """Return the keys and values of a mapping in a checkpoint's tree; empty if `tree` is no mapping.

    The tree stores a dict as `{"dict": [[key, value], ...]}`, and an OrderedDict with "ordered" as its key.
    """
    if not isinstance(tree, dict):
        return []
    return [(key, value) for key, value in tree.get("ordered") or tree.get("dict") or []]


def _tensors_in(value: Any) -> dict[str, str]:
    """Return the names of a module's tensors in the files, by state_dict key; empty for other objects."""
    # A module's state_dict is an OrderedDict, which the tree marks with the key "ordered".
    if not isinstance(value, dict) or "ordered" not in value:
        return {}
    return {
        str(key): inner["tensor"]
        for key, inner in _pairs(value)
        if isinstance(inner, dict) and "tensor" in inner
    }


class _Source:
    """An open safetensors file of a checkpoint, with its decoded header."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        # A safetensors file contains the length of the header (8 bytes), the header (JSON), and the tensors.
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        metadata = header.pop("__metadata__", {})
        self.stored_as_bytes: dict[str, Entry] = json.loads(metadata.get("slurmddp_dtypes", "{}"))
        """By name, the real type and shape of each tensor that is stored as bytes."""
        self.entries: dict[str, Entry] = header
        self.data_start = 8 + length

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of the tensor `name` in pieces of at most CHUNK_BYTES."""
        start, stop = self.entries[name]["data_offsets"]
        self.stream.seek(self.data_start + start)
        left = stop - start
        while left:
            chunk = self.stream.read(min(left, CHUNK_BYTES))
            if not chunk:
                raise CheckpointError(
                    "The checkpoint became shorter while it was exported.", hint="Run the export again."
                )
            left -= len(chunk)
            yield chunk


@dataclass(frozen=True)
class _Tensor:
    """A tensor to export: the files that contain its bytes, and its entry in the new file."""

    stored: str
    """The tensor's name in the files of the checkpoint."""
    sources: Sequence[_Source]
    """The files that contain the tensor's bytes; several files with rows, in order, for a sharded tensor."""
    dtype: str
    shape: list[int]
    size: int


def _tensor(name: str, stored: str, sources: Sequence[_Source]) -> _Tensor:
    """Describe the tensor `name` of the model, which the files `sources` contain under the name `stored`."""
    holders = [source for source in sources if stored in source.entries]
    entries = [
        _plain_entry(name, source.entries[stored], source.stored_as_bytes.get(stored)) for source in holders
    ]

    shape = list(entries[0]["shape"])
    if len(entries) > 1:
        shape[0] = sum(entry["shape"][0] for entry in entries)
    size = sum(stop - start for start, stop in (entry["data_offsets"] for entry in entries))
    return _Tensor(stored, holders, entries[0]["dtype"], shape, size)


def _plain_entry(name: str, entry: Entry, real: Entry | None) -> Entry:
    """Return the header entry of a tensor with its real type and shape, as safetensors names the type.

    Args:
        name: the tensor's name, for the error.
        entry: the entry in the header of the checkpoint's file.
        real: the real type and shape of a tensor that is stored as bytes; None for other tensors.

    Raises:
        CheckpointError: safetensors has no name for the type.
    """
    if real is None:
        return entry

    if real["dtype"] not in _NAMES:
        raise CheckpointError(
            f"{name} is of type {real['dtype']}, for which safetensors has no name. Nothing was written.",
            hint="Read the tensor in Python with slurmddp.checkpoint.read.",
        )
    return {**entry, "dtype": _NAMES[real["dtype"]], "shape": real["shape"]}


def _write(output: Path, tensors: Mapping[str, _Tensor]) -> None:
    # The types with the largest elements come first, so that each tensor starts at a multiple of its
    # element size.
    ordered = sorted(tensors.items(), key=lambda item: -_WIDTHS.get(item[1].dtype, 1))
    head, total = _head(ordered)
    try:
        space.require(output.parent, len(head) + total)
        with replacing(output) as target:
            target.write(head)
            for _, tensor in ordered:
                for source in tensor.sources:
                    for chunk in source.chunks(tensor.stored):
                        target.write(chunk)
        sync_folder(output.parent)
    except OSError as error:
        raise SlurmddpError(
            f"{output} could not be written: {error.strerror or error}.", hint="Give another --output."
        ) from error


def _head(ordered: list[tuple[str, _Tensor]]) -> tuple[bytes, int]:
    """Return the first bytes of the new file (length and header), and the size of all tensors in bytes.

    The header contains neither the run nor the step, so that equal weights give identical files.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [offset, offset + tensor.size],
        }
        offset += tensor.size

    text = json.dumps(header, separators=(",", ":")).encode()
    # The tensors begin at a multiple of 8 bytes, the largest element size.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, offset
