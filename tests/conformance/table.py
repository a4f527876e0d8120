"""Two columns of outcomes and one verdict: dlab must pass what gloo passes."""

from collections import Counter
from collections.abc import Iterator

from conformance.client import Outcome

BACKENDS = ("gloo", "dlab")
Row = dict[str, Outcome]  # by backend

# Errors with which dlab may fail though gloo passes, and why.
EXEMPT = {
    "monitored_barrier is only implemented for GLOO": "torch itself refuses dist.monitored_barrier to all but gloo, by "
    "name; dlab's group has one"
}

NAME_WIDTH = 62
WHY_WIDTH = 100


def exemption(outcome: Outcome) -> str | None:
    return next((why for error, why in EXEMPT.items() if error in outcome.why), None)


def heading() -> str:
    return f"{'test':{NAME_WIDTH}} " + " ".join(f"{backend:4}" for backend in BACKENDS) + "  why not"


def line(test: str, row: Row) -> str:
    """One row: both verdicts, and the reason of the last one that is not a pass."""
    verdicts = " ".join(f"{row[backend].verdict:4}" for backend in BACKENDS)
    reasons = [row[backend].why for backend in BACKENDS if row[backend].verdict != "pass"]
    return f"{test:{NAME_WIDTH}} {verdicts}  {reasons[-1][:WHY_WIDTH] if reasons else ''}".rstrip()


def shortfalls(rows: dict[str, Row]) -> list[str]:
    """The tests that gloo passes and dlab does not; a skip is no pass."""
    return [test for test, row in rows.items() if row["gloo"].verdict == "pass" != row["dlab"].verdict]


def faults(rows: dict[str, Row]) -> list[str]:
    """The shortfalls that nothing excuses."""
    return [test for test in shortfalls(rows) if not exemption(rows[test]["dlab"])]


def summary(rows: dict[str, Row]) -> Iterator[str]:
    for backend in BACKENDS:
        count = Counter(row[backend].verdict for row in rows.values())
        seconds = sum(row[backend].seconds for row in rows.values())
        yield f"{backend}: {count['pass']} pass, {count['skip']} skip, {count['fail']} fail, in {seconds:.0f} s"
    for test in shortfalls(rows):
        row = rows[test]["dlab"]
        yield f"gloo passes and dlab does not: {test}: {exemption(row) or row.why}"
    yield f"faults: {len(faults(rows)) or 'none, dlab passes every test that it should'}"
