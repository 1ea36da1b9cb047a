"""The batch step: what a job does before and after its ranks; standard library alone, Python 3.8 or later."""
