"""Refuse a malformed address of rank 0's node, which no rank could reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmddp.environments.names import MASTER_ADDR_VARIABLE
from slurmddp.errors import ConfigError


def refuse_malformed_address(config: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Raise ConfigError if a job on a cluster would get a malformed SLURMDDP_MASTER_ADDR.

    Args:
        config: a checked configuration.
        environ: the environment of the command, which the ranks inherit.
    """
    if config["cluster"] is None or config["launcher"] == "local":
        # Ranks of a local run always use the loopback address, so the variable has no effect.
        return

    place = "cluster.env"
    address = config["cluster"]["env"].get(MASTER_ADDR_VARIABLE)
    if address is None:
        place = "the environment"
        address = environ.get(MASTER_ADDR_VARIABLE, "")

    if not address:
        return

    # Imported here, because few commands set the variable, and the module needs the import of socket.
    from slurmddp.host.address import is_malformed_ipv4

    if is_malformed_ipv4(str(address)):
        raise ConfigError(
            f"{MASTER_ADDR_VARIABLE} of {place}, {address!r}, is not an IPv4 address.",
            hint="An IPv4 address has four numbers up to 255, such as 10.0.0.7.",
        )
