"""Makes `python -m dlab …` the same as `dlab …`, for shells that do not have the script on their PATH."""

import sys

from dlab.cli import main

sys.exit(main())
