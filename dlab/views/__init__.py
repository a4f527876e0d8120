"""Pictures of events. A view takes events, live or read from a file, and nothing else. Taught in `00_tour.ipynb`."""

from dlab.views.curves import LossCurves
from dlab.views.live import show_live
from dlab.views.messages import Messages
from dlab.views.source import show_source

__all__ = ["LossCurves", "Messages", "show_live", "show_source"]
