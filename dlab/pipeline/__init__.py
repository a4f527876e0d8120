"""Pipelines: the stages of a model on several ranks, and schedules that say who does what when.

Taught in `08_pipeline.ipynb`.
"""

from dlab.pipeline.actions import Action
from dlab.pipeline.execution import TimeSlot
from dlab.pipeline.makers import schedule
from dlab.pipeline.runner import Pipeline
from dlab.pipeline.schedules import Schedule
from dlab.pipeline.splitting import split

__all__ = ["Action", "Pipeline", "Schedule", "TimeSlot", "schedule", "split"]
