"""Print the progress of a search: its trials, their results, and the best trial."""

from __future__ import annotations

import sys

from slurmddp.cli.start_view import StartView, how_to_show
from slurmddp.control.search import BestTrial, Searched, SearchLeft, TrialEnded, WaitsForTrials
from slurmddp.runs.text_format import number, shorter


class SearchView(StartView):
    """Prints each event of a search; an instance is the `report` argument of `search_best`."""

    def __call__(self, event: object) -> None:
        """Print an event."""
        match event:
            case WaitsForTrials():
                print("Waiting for these runs. Ctrl-C ends the search, not the runs.", flush=True)
            case TrialEnded(run=run, state=state, metric=metric, value=value):
                shown = state if metric is None else f"{metric} {number(value)}"
                print(f"result  {run}  {shown}", flush=True)
            case SearchLeft():
                print("slurmddp: the search has stopped; the same command continues it.", file=sys.stderr)
            case Searched(sweep=sweep, best=best):
                if best is not None:
                    print(f"\nbest    {_shown(best)}")
                print(how_to_show(sweep))
            case _:
                super().__call__(event)


def _shown(best: BestTrial) -> str:
    return f"{best.run}  {shorter(best.settings)}  {best.metric} {number(best.value)}"
