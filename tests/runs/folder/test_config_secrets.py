"""Pages and records that people share hold expressions in place of values of the environment."""

from __future__ import annotations

from slurmddp.runs.folder.config_secrets import expressions, without_environment


def config(token: object) -> dict[str, object]:
    return {
        "seed": 1,
        "data": {"token": token, "roots": ["/a", f"/{token}"]},
        "from_environment": {"data": {"token": "${oc.env:TOKEN}", "roots": {1: "/${oc.env:TOKEN}"}}},
    }


def test_another_value_has_another_hash_and_is_not_shown() -> None:
    first, other = (without_environment(config(token), digests=True) for token in ("s3cret", "0ther"))
    assert first != other and first == without_environment(config("s3cret"), digests=True)
    assert str(first["data"]["token"]).startswith("${oc.env:TOKEN} (sha256 ")
    assert "s3cret" not in str(first) and first["data"]["roots"][0] == "/a" and first["seed"] == 1


def test_a_configuration_without_such_values_stays_as_it_is() -> None:
    plain = {"a": {"b": [1, {"c": ()}]}, "d": None}
    assert without_environment(plain, digests=True) == plain


def test_a_node_that_was_replaced_is_shown_as_it_is() -> None:
    assert without_environment({**config("x"), "data": None})["data"] is None


def test_short_values_are_not_looked_for_in_others() -> None:
    raw = {"a": "${oc.env:N}", "b": "${c}", "c": 12}
    assert expressions(raw, {"a": "1", "b": 12, "c": 12}) == {"a": "${oc.env:N}"}
