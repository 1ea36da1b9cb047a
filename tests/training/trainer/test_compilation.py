"""Compiled models keep the names of their tensors; the compiler must be there."""

from __future__ import annotations

import copy
from functools import partialmethod

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

from slurmddp.errors import ConfigError
from slurmddp.training.precision import autocast
from slurmddp.training.trainer.compilation import compile_in_place, uncompiled

CPU = torch.device("cpu")


class Noticed(nn.Module):
    """Keeps whether its forward pass was compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.hidden: torch.dtype | None = None
        self.compiled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.compiled = torch.compiler.is_compiling()
        hidden: torch.Tensor = self.layer(x)
        self.hidden = hidden.dtype
        return hidden


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as for a compiled model, but run no C++ compiler, which takes half a minute."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))


@pytest.mark.usefixtures("traced")
def test_a_compiled_model_keeps_its_names_and_its_precision() -> None:
    model = Noticed()
    names = list(model.state_dict())
    autocast(model, CPU, torch.bfloat16)
    compile_in_place(model, CPU)
    out = model(torch.ones(2, 4))
    assert (model.compiled, model.hidden, out.dtype) == (True, torch.bfloat16, torch.float32)
    assert list(model.state_dict()) == names == list(copy.deepcopy(model).state_dict())
    with uncompiled(True):
        assert torch.equal(model(torch.ones(2, 4)), out)
        assert model.compiled is False
    model(torch.ones(2, 4))
    assert model.compiled is True


def test_a_missing_compiler_is_told() -> None:
    # monkeypatch would hide the option afterwards, so that no later model could be compiled.
    with inductor.patch("cpp.cxx", ("/nowhere/g++",)), pytest.raises(ConfigError) as caught:
        compile_in_place(nn.Linear(1, 1), CPU)
    assert "no C++ compiler" in caught.value.message and "train.compile=false" in caught.value.hint
