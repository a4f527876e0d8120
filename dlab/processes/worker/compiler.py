"""Import torch's compiler when something is compiled, not when the first optimizer takes a step.

Every `optimizer.step()` tells the compiler to break its graph there, and imports it for that: 1.5 s in every worker.
Until more of it is needed, a stand-in provides the three functions that optimizers and process groups call, which do
nothing before the first compilation. Any other access imports the real module, which then replaces the stand-in.
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
    __file__ = os.path.join(os.path.dirname(torch.__file__), "_dynamo", "__init__.py")  # for inspect
    trace_rules = SimpleNamespace(clear_lru_cache=lambda: None)  # called by init_process_group; nothing is cached yet

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Do nothing, since nothing is being compiled."""

    def disable(self, function: Callable[..., Any] | None = None, recursive: bool = True, **options: Any) -> Any:
        """Return the function itself; torch uses it to keep three methods of optimizers from being compiled."""
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
