"""Pictures of events. A view takes events, live or read from a file, and nothing else. Taught in `00_tour.ipynb`."""

from dlab.views.curves import LossCurves
from dlab.views.gradients import GradientFlow
from dlab.views.messages import Messages
from dlab.views.pipeline import PipelineChart
from dlab.views.shards import ShardView, shard_events
from dlab.views.source import show_source
from dlab.views.staleness import Staleness
from dlab.views.throughput import Throughput
from dlab.views.timeline import Timeline
from dlab.views.vocabulary import event_kinds

__all__ = [
    "GradientFlow",
    "LossCurves",
    "Messages",
    "PipelineChart",
    "ShardView",
    "Staleness",
    "Throughput",
    "Timeline",
    "event_kinds",
    "shard_events",
    "show_source",
]
