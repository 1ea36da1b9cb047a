"""The settings of a benchmark, which the ranks receive as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from slurmddp.errors import ConfigError
from slurmddp.near_matches import near_matches

BENCHES: Mapping[str, str] = {
    "cluster": "cores, memory, disk and clock of each node; latency and bandwidth between nodes; all-reduce",
    "collectives": "every all-reduce algorithm beside torch's own, by size",
    "strategies": "a training step of every strategy beside torch's DDP, FSDP and DataParallel",
    "scaling": "a training step on growing numbers of ranks, at a fixed batch per rank and in total",
}
_SHARE_A_BATCH = ("strategies", "scaling")
"""The benchmarks that share a batch among the ranks."""
SIZES = "1kB,4kB,16kB,64kB,256kB,1MB,4MB,16MB,64MB"
"""The default sizes of reduced tensors."""
_UNITS = {"B": 1, "kB": 1_000, "MB": 1_000_000, "GB": 1_000_000_000}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of a benchmark; only results with equal settings can be compared.

    Raises:
        ConfigError: a setting is out of range.
    """

    bench: str
    """The name of the benchmark, a key of `BENCHES`."""
    sizes: tuple[int, ...]
    """Sizes of the reduced tensors in bytes; multiples of 4."""
    repetitions: int = 20
    warmup: int = 5
    """Number of first repetitions whose times are not used."""
    seed: int = 0
    width: int = 512
    """Rows and columns of each layer of the trained model."""
    layers: int = 4
    batch: int = 64
    """Samples of a step on all ranks together."""

    def __post_init__(self) -> None:
        if self.bench not in BENCHES:
            raise ConfigError(
                f"There is no benchmark {self.bench!r}.", hint=near_matches(self.bench, BENCHES)
            )

        for name in ("repetitions", "width", "layers", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}.", hint="Give 1 or more.")
        if self.warmup < 0:
            raise ConfigError(f"--warmup is {self.warmup}, which is negative.", hint="Give 0 or more.")

        if not self.sizes or any(size < 4 or size % 4 for size in self.sizes):
            raise ConfigError(
                f"--sizes contains a size that is not a multiple of 4 bytes: {list(self.sizes)} (bytes).",
                hint="Give multiples of 4 bytes: the benchmark reduces tensors of 32-bit numbers.",
            )

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError if `ranks` is 1, or if the benchmark can't divide its batch by `ranks`."""
        if ranks < 2:
            raise ConfigError(
                f"The benchmark {self.bench!r} needs at least 2 ranks, and there is a single rank.",
                hint="Start more ranks: slurmddp bench ... -n 2, or nodes=2.",
            )

        if self.bench in _SHARE_A_BATCH and self.batch % ranks:
            raise ConfigError(
                f"A batch of {self.batch} samples can't be shared by {ranks} ranks, because it is not a "
                f"multiple of {ranks}.",
                hint="Give a multiple of the number of ranks as --batch.",
            )

    def to_json(self) -> str:
        """Return the settings as one line of JSON, which `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Return the settings that a text from `to_json` describes."""
        fields = json.loads(text)
        fields["sizes"] = tuple(fields["sizes"])
        return cls(**fields)


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse sizes such as "1kB,64MB".

    Returns:
        The sizes in bytes, sorted and without duplicates. A kB is 1,000 bytes.

    Raises:
        ConfigError: a part between commas is not a number with the unit B, kB, MB or GB.
    """
    sizes = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(B|kB|MB|GB)\s*", part)
        if not match:
            raise ConfigError(
                f"--sizes contains {part.strip()!r}, which is not a size.",
                hint=f"Give numbers with B, kB, MB or GB, for example {SIZES}.",
            )
        sizes.add(int(match[1]) * _UNITS[match[2]])

    return tuple(sorted(sizes))


def size_label(size: int) -> str:
    """Format a number of bytes as `parse_sizes` reads it, with the largest unit that divides it: "64kB"."""
    unit = max((name for name in _UNITS if size % _UNITS[name] == 0), key=lambda name: _UNITS[name])
    return f"{size // _UNITS[unit]}{unit}"
