"""Read text files as training data, a token per character; by default Python's standard library.

The library is about 12 MB of text on each machine, so the first training needs no download. A checksum of a
file's name assigns the file to training or to the held-out part. So the split stays the same when files are
added or removed, and training reads no held-out file. Of a single file, the end is held out.
"""

from __future__ import annotations

import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from slurmddp.errors import ConfigError

CHARACTERS = "\n\t" + "".join(chr(code) for code in range(32, 127))
"""The characters of the vocabulary; any other byte becomes token 0, shown as `?`."""
VOCAB_SIZE = len(CHARACTERS) + 1

# Skip folders that only some installations have, so that the text is the same on each machine: installed
# packages and tests.
_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_TABLE = bytes(CHARACTERS.find(chr(byte)) + 1 if byte < 128 else 0 for byte in range(256))


Tokens = NDArray[np.uint8]


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Data set of consecutive windows of a text: each sample is (inputs, targets), shape (context,), int64.

    The targets are the inputs shifted by one token.
    """

    deterministic = True
    """Marks that reading a sample draws no random numbers, so that no generator must be seeded for it."""

    def __init__(self, tokens: Tokens, context: int) -> None:
        self._tokens = tokens
        self._context = context

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - 1) // self._context)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")

        start = index * self._context
        window = torch.from_numpy(self._tokens[start : start + self._context + 1].astype(np.int64))
        return window[:-1], window[1:]


class SourceText(Windows):
    """Data set of windows of the text files below `path`, without the part that `heldout()` returns.

    Args:
        context: the length of a sample, in characters.
        path: a file or folder; None: Python's standard library.
        pattern: a file name pattern, which selects the files of the folder.
        heldout_percent: percent of the text to hold out, at least 0 and below 100.

    Raises:
        ConfigError: the files can't be read, or contain less than one sample.
    """

    vocab_size = VOCAB_SIZE

    def __init__(
        self,
        *,
        context: int,
        path: str | None = None,
        pattern: str = "*.py",
        heldout_percent: float = 2.0,
    ) -> None:
        if context < 1:
            raise ConfigError(f"data.context is {context}.", hint="Give a number of characters above 0.")

        if not 0 <= heldout_percent < 100:
            raise ConfigError(
                f"data.heldout_percent is {heldout_percent}.", hint="Give a percentage from 0 to below 100."
            )

        self.tokens_per_sample = context
        root = Path(path).expanduser() if path is not None else Path(sysconfig.get_path("stdlib"))
        training, heldout = _read(root, pattern, heldout_percent)
        super().__init__(training, context)
        self._heldout = Windows(heldout, context)
        if len(self) == 0:
            raise ConfigError(
                f"data: the files {pattern!r} below {root} hold {len(training)} characters, "
                f"too few for one window of {context}.",
                hint="Check data.path and data.pattern, or choose a smaller data.context.",
            )

    def heldout(self) -> Windows:
        """Return the held-out samples."""
        return self._heldout

    @staticmethod
    def encode(text: str) -> torch.Tensor:
        """Return the token ids of `text`, shape (number of bytes,), dtype int64."""
        return torch.tensor(list(text.encode().translate(_TABLE)), dtype=torch.int64)

    @staticmethod
    def decode(ids: torch.Tensor) -> str:
        """Return the text of token ids, shape (n,)."""
        return "".join(("?" + CHARACTERS)[token] for token in ids.tolist())


def _read(root: Path, pattern: str, heldout_percent: float) -> tuple[Tokens, Tokens]:
    """Return the encoded text for training and the held-out text, each in the order of file names."""
    training_parts: list[bytes] = []
    heldout_parts: list[bytes] = []
    for file in _files(root, pattern):
        name = file.relative_to(root).as_posix() if file != root else file.name
        is_heldout = zlib.crc32(name.encode("utf-8", "surrogateescape")) % 10_000 < heldout_percent * 100
        parts = heldout_parts if is_heldout else training_parts
        try:
            parts.append(file.read_bytes().translate(_TABLE))
        except OSError as error:
            raise ConfigError(
                f"data: {file} can't be read: {error.strerror}.",
                hint="Check its permissions, or data.pattern.",
            ) from error

    training = np.frombuffer(b"".join(training_parts), dtype=np.uint8)
    heldout = np.frombuffer(b"".join(heldout_parts), dtype=np.uint8)
    if len(training_parts) + len(heldout_parts) > 1:
        return training, heldout

    text = np.concatenate([training, heldout])
    end = len(text) - int(len(text) * heldout_percent / 100)
    return text[:end], text[end:]


def _files(root: Path, pattern: str) -> Iterator[Path]:
    """Yield `root` if it is a file, else the files below it that match the pattern, in order."""
    if root.is_file():
        yield root
        return

    if not root.is_dir():
        raise ConfigError(
            f"data.path is {str(root)!r}, which does not exist.",
            hint="Give a file or a folder of text files that every node can read.",
        )

    try:
        files = sorted(root.rglob(pattern))
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"data.pattern is {pattern!r}: {error}.", hint="Give a file pattern such as `*.txt`."
        ) from error

    for file in files:
        if file.is_file() and not _LEFT_OUT & set(file.relative_to(root).parts):
            yield file
