"""How fast dlab is on this machine: ratios, each measured side by side in one run (`make bench`).

Each theme is a file whose functions are marked with `@row("…")` and return a `Row`; a new one is added to `THEMES`.
Nothing heavy is imported here, because every process that mp.spawn starts imports this, and its time is measured.
"""

THEMES = (
    "starting",
    "memory",
    "reading",
    "telemetry",
    "drawing",
    "reducing",
    "exchanging",
    "stepping",
    "zero",
    "sharding",
    "pipelining",
    "serving",
    "compressing",
)
