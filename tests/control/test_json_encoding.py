"""Results as JSON and back: the same value, and an error where a document is not one of its kind."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from slurmddp.control.json_encoding import VERSION, from_json, to_json


@dataclass(frozen=True)
class Inner:
    number: int
    loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    path: Path
    outcome: Literal["done", "failed"]
    is_new: bool = False
    seconds: float = 0.0
    inner: Inner | None = None
    parts: tuple[Inner, ...] = ()
    paths: tuple[Path, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


FULL = Outer(
    name="a \u00e9",
    path=Path("/runs/a"),
    outcome="failed",
    is_new=True,
    seconds=1,
    inner=Inner(3, 0.5),
    parts=(Inner(1), Inner(2)),
    paths=(Path("x"), Path("y/z")),
    metrics={"accuracy": 0.25},
)


def through_json(result: Any, kind: type[Any], host: str = "") -> Any:
    return from_json(kind, json.loads(json.dumps(to_json(result), allow_nan=False)), host)


@pytest.mark.parametrize("value", [FULL, Outer(name="", path=Path(), outcome="done")])
def test_a_result_comes_back_as_it_was(value: Outer) -> None:
    assert through_json(value, Outer) == value


def test_a_document_has_a_version_and_a_key_for_each_field() -> None:
    document = to_json(FULL)
    assert document["version"] == VERSION
    assert [*document] == ["version", *Outer.__dataclass_fields__]


def test_numbers_that_json_lacks_become_null() -> None:
    result = through_json(replace(FULL, seconds=math.inf, inner=Inner(1, math.nan)), Outer)
    assert math.isnan(result.seconds) and result.inner.loss is None


def test_paths_of_another_host_name_it() -> None:
    result = through_json(FULL, Outer, "login1")
    assert result.path == Path("login1:/runs/a") and result.paths[1] == Path("login1:y/z")


def test_unknown_keys_are_ignored_and_missing_ones_have_their_defaults() -> None:
    document = {"version": 1, "name": "a", "path": "b", "outcome": "done", "of_a_later_version": [1]}
    assert from_json(Outer, document) == Outer(name="a", path=Path("b"), outcome="done")


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"name": None}, "Outer.name"),
        ({"name": 3}, "Outer.name"),
        ({"path": 3}, "Outer.path"),
        ({"outcome": "lost"}, "Outer.outcome"),
        ({"is_new": 1}, "Outer.is_new"),
        ({"seconds": True}, "Outer.seconds"),
        ({"inner": []}, "Outer.inner"),
        ({"inner": {"loss": 1}}, "number"),
        ({"inner": {"number": True}}, "Outer.inner.number"),
        ({"parts": {}}, "Outer.parts"),
        ({"metrics": {"a": "b"}}, "Outer.metrics.a"),
    ],
)
def test_a_document_of_another_kind_is_an_error_with_its_place(changes: dict[str, Any], place: str) -> None:
    with pytest.raises(ValueError, match=place.replace(".", r"\.")):
        from_json(Outer, {**to_json(FULL), **changes})


@pytest.mark.parametrize("document", [None, [], "text", 3])
def test_a_document_that_is_no_dictionary_is_an_error(document: Any) -> None:
    with pytest.raises(ValueError, match="Outer is"):
        from_json(Outer, document)
