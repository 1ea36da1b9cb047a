"""One reason why a request does not fit a site."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A key whose value the site does not allow or does not have."""

    key: str
    """The key of the configuration: `nodes`, `cluster.sbatch`."""
    value: str
    """The value in the job's configuration."""
    site: str
    """A clause: the site's limit, or the things that the site has."""
    remedy: str
    """Sentences that tell the person which key to change, and how."""

    def __str__(self) -> str:
        return f"{self.key}={self.value}: {self.site}. {self.remedy}"
