"""Objects from configuration, and errors that name the key."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

from slurmddp.errors import ConfigError
from slurmddp.training.instantiate import instantiate, locate


class Thing:
    """Keeps what it was made of."""

    def __init__(self, size: int, *rest, name: str = "none", parts=None) -> None:
        self.size, self.rest, self.name, self.parts = size, rest, name, parts

    @classmethod
    def small(cls) -> Thing:
        return cls(1)


def refuse(value: int = 0) -> None:
    raise ValueError(f"{value} is odd")


@pytest.fixture(autouse=True)
def things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "things", sys.modules[__name__])


def test_a_target_is_called_with_its_keys() -> None:
    built = instantiate({"_target_": "things.Thing", "size": 3, "name": "a"})
    assert isinstance(built, Thing)
    assert (built.size, built.name) == (3, "a")


def test_arguments_of_the_caller_come_first_and_last() -> None:
    built = instantiate({"_target_": "things.Thing", "_args_": [8, 9], "name": "a"}, 7, name="b")
    assert (built.size, built.rest, built.name) == (7, (8, 9), "b")


def test_nested_targets_are_built() -> None:
    inner = {"_target_": "things.Thing", "size": 1}
    built = instantiate({"_target_": "things.Thing", "size": 2, "parts": {"x": [inner, 5], "y": inner}})
    assert built.parts["x"][0].size == built.parts["y"].size == 1
    assert built.parts["x"][1] == 5


def test_partial() -> None:
    built = instantiate({"_target_": "things.Thing", "_partial_": True, "name": "late"})
    assert isinstance(built, functools.partial)
    assert built(4).size == 4


def test_methods_builtins_and_torch() -> None:
    assert instantiate({"_target_": "things.Thing.small"}).size == 1
    assert instantiate({"_target_": "dict", "a": 1}) == {"a": 1}
    assert isinstance(instantiate({"_target_": "torch.nn.Linear", "_args_": [2, 3]}), torch.nn.Linear)
    optimizer = instantiate({"_target_": "torch.optim.AdamW", "lr": 0.5}, torch.nn.Linear(1, 1).parameters())
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_plain_values_stay() -> None:
    assert instantiate({"a": [1, {"b": None}]}) == {"a": [1, {"b": None}]}
    assert instantiate(None) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_target_": 3}, r"model\._target_ is 3, which is no import path"),
        ({"_target_": "os; rm -rf /"}, "no import path"),
        ({"_target_": "no_such_module.Net"}, "no module no_such_module"),
        ({"_target_": "torch.nm.Linear"}, r"torch has no nm.*Did you mean"),
        ({"_target_": "torch.nn.Linaer"}, r"torch\.nn has no 'Linaer'.*Did you mean Linear"),
        ({"_target_": "torch.pi"}, "a float that can't be called"),
        ({"_target_": "things.Thing", "sise": 3}, r"model\.sise is given.*no argument 'sise'.*mean size"),
        ({"_target_": "things.Thing"}, r"model: things\.Thing can't be called so: missing a required"),
        ({"_target_": "things.refuse", "value": 5}, r"refused its arguments: 5 is odd.*value=5"),
        ({"_target_": "things.Thing", "_partail_": True}, r"model\._partail_ is not understood.*_partial_"),
        ({"_target_": "things.Thing", "size": 1, "parts": [{"_target_": "things.Thong"}]},
         r"model\.parts\[0\]\._target_.*'Thong'.*Thing"),
        ({1: 2, "_target_": "things.Thing"}, "no argument name"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_key(config, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        instantiate(config, _key_="model")


def test_a_module_that_breaks_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_by_import.py").write_text("import not_there_at_all\n")
    (tmp_path / "broken_by_value.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"importing broken_by_import failed.*not_there_at_all"):
        locate("broken_by_import.Net")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        locate("broken_by_value.Net")
