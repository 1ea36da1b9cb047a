"""The strategy of docs/guides/extending.md: `MeanOfEachGradient`."""

from support.own import define

define("MeanOfEachGradient", globals())
