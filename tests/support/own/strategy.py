"""The strategy of docs/extending.md: `MeanOfEachGradient`."""

from support.own import define

define("MeanOfEachGradient", globals())
