"""The code that a job runs before and after its ranks; it needs only the standard library of Python 3.8."""
