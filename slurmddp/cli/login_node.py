"""Find the login node of a submission in its settings, without the modules that speak ssh: most name none."""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmddp.errors import ConfigError

SUBMITTING = frozenset({"train", "run", "controller", "bench"})
"""Commands whose settings may name a login node; the others are about runs."""


def of_settings(parsed: argparse.Namespace) -> dict[str, str | None] | None:
    """Return the keys of the login node that settings name; None if the command belongs to this machine."""
    if parsed.cfg or parsed.info:  # They describe the configuration, and need no cluster.
        return None
    # Hydra is imported on use.
    from slurmddp.cli import hydra_flags
    from slurmddp.config.composition.compose import login_node

    sources = hydra_flags.sources(parsed)
    words = parsed.words if hasattr(parsed, "words") else parsed.overrides
    if getattr(parsed, "multirun", False):
        from slurmddp.config.composition import search_space
        from slurmddp.config.composition.sweep import points

        if search_space.is_search(words):
            first = search_space.read(words, Path.cwd(), sources).edges()[0]
            if keys := login_node(first, Path.cwd(), sources):
                raise ConfigError(
                    f"A search waits for its results, so it can't go through ssh={keys['ssh']}.",
                    hint="Start it on the login node, without ssh=.",
                )
            return None
        words = points(words, Path.cwd(), sources)[0]
    return login_node(words, Path.cwd(), sources)
