"""Long results are cut, and the agent learns what is missing."""

from __future__ import annotations

import json

import pytest

from slurmddp.mcp_server.shortening import MAX_BYTES, shortened


def test_a_short_document_stays_as_it_is() -> None:
    document = {"version": 1, "runs": [{"name": "a", "step": None}], "more": 0}
    assert shortened(document) == (document, [])


@pytest.mark.parametrize(
    ("key", "kept"), [("lines", [9_990, 9_999]), ("runs", [0, 9]), ("history", [9_990, 9_999])]
)
def test_a_long_list_keeps_the_items_that_matter(key: str, kept: list[int]) -> None:
    texts = [f"{number} {'x' * 590}" for number in range(10_000)]
    document, cuts = shortened({"name": "a", key: texts}, max_bytes=7_000)
    assert [int(document[key][place].split()[0]) for place in (0, -1)] == kept
    assert len(cuts) == 1 and "10 of 10000 items" in cuts[0] and f"`{key}`" in cuts[0]


def test_a_long_text_keeps_its_beginning_and_inner_parts_are_named() -> None:
    document, cuts = shortened({"runs": [{"script": "ab" * 50_000}]})
    assert document["runs"][0]["script"] == "ab" * 10_000
    assert cuts == ["`runs[0].script` has the first 20000 of 100000 characters."]
    assert len(json.dumps(document)) <= MAX_BYTES
