"""`python -m dlab.bench`: measure, and print the results. Progress goes to stderr, the table to stdout.

A complete run also writes the page of figures, `RESULTS.md` beside this file.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from dlab.bench import THEMES

PAGE = Path(__file__).with_name("RESULTS.md")

# The measuring modules are imported in main(), because processes that mp.spawn starts import this file.


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the chosen rows and print their table; returns 1 only if a measurement failed to run."""
    parser = argparse.ArgumentParser(prog="python -m dlab.bench", description="Measure dlab on this machine.")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: rough figures in about a minute")
    parser.add_argument("-k", metavar="WORD", default="", help="only the rows with this word in their name")
    options = parser.parse_args(argv)

    from dlab.bench import measure, rows, table

    machine = measure.machine()  # first, because the benchmark changes the load
    for theme in THEMES:
        importlib.import_module(f"dlab.bench.{theme}")
    chosen = [name for name in rows.REGISTERED if options.k.lower() in name.lower()]
    if not chosen:
        parser.error(f"no row has {options.k!r} in its name; there are: {'; '.join(rows.REGISTERED)}")

    measured, code = [], 0
    for position, name in enumerate(chosen, 1):
        print(f"[{position}/{len(chosen)}] {name} …", end="", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            measured.append(rows.REGISTERED[name](name, options.quick))
        except KeyboardInterrupt:
            print(" stopped", file=sys.stderr)
            code = 130  # the exit code that shells expect after Ctrl-C
            break
        except Exception:
            print(" broke", file=sys.stderr)
            code = 1
            traceback.print_exc()
        else:
            print(f" {time.perf_counter() - start:.0f} s", file=sys.stderr)
    print(table.as_text(measured, machine))
    if not (options.k or options.quick or code):
        PAGE.write_text(table.as_page(measured, machine))
        print(f"\nwritten to {PAGE}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
