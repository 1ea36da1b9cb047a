"""The launcher of docs/guides/extending.md: `Behind`."""

from support.own import define

define("Behind", globals())
