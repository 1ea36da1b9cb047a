"""A wrapped model keeps its names, its ties and its optimizer; a closed Distributon leaves no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load

from support.distributed import wrapper_jobs
from support.distributed.doc_programs import newest_weights
from support.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.usefixtures("rank_server")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the findings of two ranks and then of one, and the names of the tensors that the two saved."""
    folder: Path = tmp_path_factory.mktemp("tied")
    two = run_ranks(wrapper_jobs.train_tied, 2, str(folder), 3)
    names = list(load(newest_weights(folder)))
    return [*two, *run_ranks(wrapper_jobs.train_tied, 1, str(folder), 1)], names


def test_d7_a_wrapped_model_keeps_names_ties_and_optimizer(found) -> None:
    (first, second, alone), names = found
    for one in (first, second, alone):
        assert one["device"] and one["tied"] and one["optimizer holds them"] and one["through the compiler"]
    assert [one["wrapped"] for one in (first, alone)] == ["DistributedDataParallel", "Tied"]
    assert not [name for name in names if "module." in name]
    assert [name for name in names if name.startswith("objects/model/")] == ["objects/model/tokens.weight"], (
        "a tied tensor is stored once"
    )
    assert not torch.equal(first["loaded"]["head.weight"], first["weights"]["head.weight"])


def test_d7_a_checkpoint_of_two_ranks_loads_on_one(found) -> None:
    (first, second, alone), _ = found
    assert (first["step"], alone["step"]) == (0, 3)
    for name in ("tokens.weight", "head.weight"):
        assert torch.equal(first["weights"][name], second["weights"][name])
        assert torch.equal(alone["loaded"][name], first["weights"][name])


def test_d12_a_closed_distributon_leaves_variables_handlers_and_no_group(found) -> None:
    ranks, _ = found
    assert [one["group"] for one in ranks] == [True, True, False]
    assert [one["changed"] for one in ranks] == [True, True, True]
    assert [one["left"] for one in ranks] == [True, True, True]
