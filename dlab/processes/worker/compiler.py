"""torch's compiler is imported when something is compiled, not when the first optimizer takes a step.

Every `optimizer.step()` tells the compiler to break its graph there, and for that imports it: 1.5 s in every worker.
Until somebody needs more of it, a stand-in knows the three things that optimizers and process groups ask, all of
which mean nothing before the first compilation. Any other question imports the real one, which then takes its place
for good.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

NAME = "torch._dynamo"


class _StandIn(ModuleType):
    __file__ = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "__init__.py")  # inspect asks every module
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # asked by init_process_group: nothing is cached yet

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Nothing is being compiled: there is no graph to break."""

    def disable(self, function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """torch itself asks without wrapping, to keep three methods of optimizers from being compiled."""
        if function is not None and options.get("wrapping") is False:
            return function
        return _real().disable(function, recursive, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(_real(), name)


def _real() -> Any:
    if isinstance(sys.modules.get(NAME), _StandIn):
        del sys.modules[NAME]
        vars(torch).pop("_dynamo", None)
    return importlib.import_module(NAME)


if NAME not in sys.modules:
    sys.modules[NAME] = vars(torch)["_dynamo"] = _StandIn(NAME)
