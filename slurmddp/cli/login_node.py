"""Find the login node that the settings of a submission name.

Most submissions name none, so this module imports no ssh code.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from slurmddp.errors import ConfigError


def of_settings(parsed: argparse.Namespace) -> dict[str, str | None] | None:
    """Return the keys `ssh`, `ssh_folder` and `python` of the login node that the settings name.

    Args:
        parsed: the parsed command line.

    Returns:
        None if the settings name no login node, so that the command runs on this machine.

    Raises:
        ConfigError: the command starts a search over ssh, which is not possible.
    """
    if parsed.cfg or parsed.info:
        # --cfg and --info only print the configuration, which this machine can do.
        return None

    # Imported here, because these modules import Hydra, which --cfg and --info do not need at this point.
    from slurmddp.cli import hydra_flags
    from slurmddp.config.composition.compose import login_node

    sources = hydra_flags.sources(parsed)
    overrides = parsed.words if hasattr(parsed, "words") else parsed.overrides
    if getattr(parsed, "multirun", False):
        from slurmddp.config.composition import search_space
        from slurmddp.config.composition.sweep import points

        if search_space.is_search(overrides):
            first = search_space.read(overrides, Path.cwd(), sources).edges()[0]
            if keys := login_node(first, Path.cwd(), sources):
                raise ConfigError(
                    f"A search waits for the results of its trials, so it can't run over ssh={keys['ssh']}.",
                    hint="Start it on the login node, without ssh=.",
                )

            return None

        overrides = points(overrides, Path.cwd(), sources)[0]

    return login_node(overrides, Path.cwd(), sources)
