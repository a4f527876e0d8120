"""`make conformance`: the whole of PyTorch's distributed test suite on gloo and on dlab, side by side."""

import argparse
import re
import sys

from conformance.client import Suite
from conformance.table import BACKENDS, Row, faults, heading, line, summary


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make conformance", description=__doc__)
    parser.add_argument(
        "-k", metavar="PATTERN", type=re.compile, default="", help="only tests in whose name this regular expression is"
    )
    parser.add_argument("--logs", action="store_true", help="show what the ranks of failed tests wrote")
    return parser


def show_progress(text: str) -> None:
    """Say on stderr what is running; a terminal has one line for it, which the next one takes."""
    begin, end = ("\r\x1b[K", "") if sys.stderr.isatty() else ("", "\n")
    print(begin + text, end=end, file=sys.stderr, flush=True)


def run_row(suite: Suite, test: str, position: str) -> Row:
    row = {}
    for backend in BACKENDS:
        show_progress(f"[{position}] {test} on {backend}")
        row[backend] = suite.run(backend, test)
    if sys.stderr.isatty():
        show_progress("")  # the table goes on in the same line
    return row


def show_logs(test: str, row: Row) -> None:
    for backend, outcome in row.items():
        if outcome.verdict == "fail":
            print(f"--- {test} on {backend}", outcome.reason, outcome.log, "---", sep="\n", flush=True)


def main() -> int:
    options = make_parser().parse_args()
    rows: dict[str, Row] = {}
    with Suite() as suite:
        chosen = [test for test in suite.tests if options.k.search(test)]
        if not chosen:
            sys.exit(f"None of the {len(suite.tests)} tests has {options.k.pattern!r} in its name.")
        print(heading(), flush=True)
        for number, test in enumerate(chosen, 1):
            row = rows[test] = run_row(suite, test, f"{number}/{len(chosen)}")
            print(line(test, row), flush=True)
            if options.logs:
                show_logs(test, row)
    print("", *summary(rows), sep="\n")
    return 1 if faults(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
