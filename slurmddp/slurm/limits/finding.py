"""One reason why a request does not fit a site."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A key whose value the site does not allow or does not have."""

    key: str
    """The key of the configuration: `nodes`, `cluster.sbatch`."""
    value: str
    """The value that was asked for."""
    site: str
    """What the site has, as a clause."""
    remedy: str
    """What to change, as sentences."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.site}. {self.remedy}"
