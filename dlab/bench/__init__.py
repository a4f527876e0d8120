"""What dlab is worth on this machine: ratios, each measured side by side in one run (`make bench`).

A theme is a file: its functions carry `@row("…")` and give a `Row`. A new theme is a new file and its name in `THEMES`.
Nothing heavy is imported here: every process that mp.spawn starts imports this again, and its time is measured.
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
    "serving",
    "compressing",
)
