"""Objects from configuration, and errors that name the key."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slurmddp.errors import ConfigError
from slurmddp.plugins import locate
from slurmddp.training.instantiate import instantiate
from slurmddp.training.trainer.components import build_loss


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


def test_arguments_of_the_caller_come_first_and_last() -> None:
    built = instantiate({"_target_": "things.Thing", "_args_": [8, 9], "name": "a"}, 7, name="b")
    assert (built.size, built.rest, built.name) == (7, (8, 9), "b")


def test_nested_targets_are_built() -> None:
    inner = {"_target_": "things.Thing", "size": 1}
    built = instantiate({"_target_": "things.Thing", "size": 2, "parts": {"x": [inner, 5], "y": inner}})
    assert built.parts["x"][0].size == built.parts["y"].size == 1
    assert built.parts["x"][1] == 5
    built = instantiate({"_target_": "things.Thing", "_recursive_": False, "size": 2, "parts": [inner]})
    assert built.parts == [inner]


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


def test_what_hydras_own_would_break() -> None:
    """Each line is a reason to have a function beside Hydra's; if one fails, its reason is gone."""
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate as hydras
    from omegaconf import DictConfig, ListConfig
    from omegaconf.errors import OmegaConfBaseException

    secret = {"_target_": "things.Thing", "size": 1, "name": "pa${ss"}
    assert instantiate(secret).name == "pa${ss"
    with pytest.raises(OmegaConfBaseException):
        hydras(secret)
    nested = {"_target_": "things.Thing", "size": 1, "parts": {"a": [1]}}
    assert type(instantiate(nested).parts) is dict and type(instantiate(nested).parts["a"]) is list
    assert type(hydras(nested).parts) is DictConfig and type(hydras(nested).parts["a"]) is ListConfig
    wrong = {"_target_": "things.Thing", "sise": 1}
    with pytest.raises(ConfigError, match=r"model\.sise is given.*Did you mean size"):
        instantiate(wrong, _key_="model")
    with pytest.raises(InstantiationException) as caught:
        hydras({"model": wrong})
    assert "model.sise" not in str(caught.value) and "mean size" not in str(caught.value)
    code = "import sys, slurmddp.training.instantiate; print({'hydra', 'omegaconf'} & sys.modules.keys())"
    assert subprocess.check_output([sys.executable, "-c", code]) == b"set()\n"


def test_plain_values_stay() -> None:
    assert instantiate({"a": [1, {"b": None}]}) == {"a": [1, {"b": None}]}
    assert instantiate(None) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_target_": 3}, r"model\._target_ is 3, which is not an import path"),
        ({"_target_": "os; rm -rf /"}, "not an import path"),
        ({"_target_": "no_such_module.Net"}, "no module no_such_module"),
        ({"_target_": "torch.nm.Linear"}, r"torch has no nm.*Did you mean"),
        ({"_target_": "torch.nn.Linaer"}, r"torch\.nn has no 'Linaer'.*Did you mean Linear"),
        ({"_target_": "torch.pi"}, "a float that can't be called"),
        ({"_target_": "things.Thing", "sise": 3}, r"model\.sise is given.*no argument 'sise'.*mean size"),
        ({"_target_": "things.Thing"}, r"model: things\.Thing can't be called with these arguments: missing"),
        ({"_target_": "things.refuse", "value": 5}, r"refused its arguments: 5 is odd.*value=5"),
        ({"_target_": "things.Thing", "_partail_": True}, r"`model\._partail_` is not a special.*_partial_"),
        ({"_target_": "things.Thing", "size": 1, "parts": [{"_target_": "things.Thong"}]},
         r"model\.parts\[0\]\._target_.*'Thong'.*Thing"),
        ({1: 2, "_target_": "things.Thing"}, "not an argument name"),
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


@pytest.mark.parametrize("convert", ["none", "partial", "object", "all", "ALL"])
def test_mappings_and_lists_are_plain_whatever_is_to_be_converted(convert: str) -> None:
    built = instantiate({"_target_": "things.Thing", "_convert_": convert, "size": 2, "parts": {"a": [1]}})
    assert type(built.parts) is dict and built.parts == {"a": [1]}


def plain_loss(logits, targets):
    return logits - targets


def weighted_loss(logits, targets, weight=1):
    return weight * (logits - targets)


def make_loss(factor: int):
    return lambda logits, targets: factor * (logits - targets)


class Counted:
    built = 0

    def __init__(self) -> None:
        Counted.built += 1


def loss_with(logits, targets, inner):
    assert isinstance(inner, Counted)
    return logits - targets


class LossOf:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, logits, targets):
        return self.factor * (logits - targets)


@pytest.mark.parametrize(
    ("config", "result"),
    [
        ({"_target_": "things.plain_loss"}, 2),
        ({"_target_": "things.plain_loss", "_partial_": True}, 2),
        ({"_target_": "things.weighted_loss", "weight": 5}, 10),
        ({"_target_": "things.make_loss", "factor": 3}, 6),
        ({"_target_": "things.LossOf", "factor": 4}, 8),
    ],
)
def test_a_function_that_lacks_arguments_is_the_loss_itself(config, result: int) -> None:
    assert build_loss(config)(5, 3) == result


def test_what_a_loss_holds_is_built_once() -> None:
    Counted.built = 0
    loss = build_loss({"_target_": "things.loss_with", "inner": {"_target_": "things.Counted"}})
    assert loss(5, 3) == 2 and Counted.built == 1


def test_functions_and_classes_of_torch_are_losses() -> None:
    for target in ("torch.nn.functional.mse_loss", "torch.nn.MSELoss", "torch.nn.functional.cross_entropy"):
        assert callable(build_loss({"_target_": target}))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"_target_": "things.make_loss"},
            r"loss: things\.make_loss can't be called with these arguments: missing",
        ),
        (
            {"_target_": "things.LossOf"},
            r"loss: things\.LossOf can't be called with these arguments: missing",
        ),
        ({"_target_": "things.weighted_loss", "wieght": 5}, r"loss\.wieght is given.*mean weight"),
        ({"_target_": "things.Thing", "size": 1}, "loss._target_ 'things.Thing' gives a Thing.*called"),
        ({"_target_": "things.plain_loss", "_partial_": False}, "loss: .*missing a required"),
    ],
)
def test_a_loss_that_is_none_is_refused(config, message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        build_loss(config)
