"""Variables of NCCL that nobody reads are told before a job starts."""

from __future__ import annotations

import pytest

from slurmddp.config.checks.nccl_variables import misspelled


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("NCCL_SOKET_IFNAME", "Did you mean NCCL_SOCKET_IFNAME"),
        ("NCCL_IB_TIMEOUTS", "Did you mean NCCL_IB_TIMEOUT"),
        ("NCCL_ASYNC_ERROR_HANDLING", "torch reads TORCH_NCCL_ASYNC_ERROR_HANDLING."),
        ("NCCL_QQQQQQQQ", "ignores it."),
    ],
)
@pytest.mark.parametrize("place", ["cluster.env", "cluster.setup", "the environment"])
def test_t12_an_unknown_variable_of_nccl_is_told_with_a_near_match(place, name, meant):
    cluster = {
        "env": {name: "1"} if place == "cluster.env" else {},
        "setup": [f"module load cuda; export {name}=1"] if place == "cluster.setup" else [],
    }
    [note] = misspelled({"cluster": cluster}, {name: "1"} if place == "the environment" else {})
    assert note.startswith(f"{name} of {place} is not a variable of NCCL")
    assert meant in note


def test_t12_known_variables_and_those_of_plugins_are_not_told():
    known = {
        "NCCL_DEBUG": "INFO",
        "NCCL_VERSION": "2.28",
        "NCCL_OFI_X": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
    assert misspelled({"cluster": {"env": known, "setup": ["export NCCL_DEBUG=WARN"]}}, known) == []
    assert misspelled({"cluster": None}, known) == []
