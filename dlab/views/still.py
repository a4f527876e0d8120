"""The base of all views: a figure, a text for the terminal, and words for those who cannot see the picture."""

from __future__ import annotations

import base64
import html
import io
from abc import ABC, abstractmethod
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours: told apart by colour-blind readers too
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


class View(ABC):
    """A picture of events. Subclasses draw (`figure`), tell (`__str__`) and describe (`alt`)."""

    @abstractmethod
    def figure(self) -> Figure:
        """The picture as it is now, with labels and units on every axis."""

    @property
    @abstractmethod
    def alt(self) -> str:
        """One sentence that says what the picture shows."""

    def bundle(self) -> dict[str, Any]:
        """The still picture as a notebook stores it: with alt text, readable where no kernel runs."""
        file = io.BytesIO()
        FigureCanvasAgg(self.figure()).print_png(file)
        picture = base64.b64encode(file.getvalue()).decode()
        image = f'<img alt="{html.escape(self.alt)}" src="data:image/png;base64,{picture}">'
        return {"text/html": image, "image/png": picture, "text/plain": str(self)}

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return self.bundle()

    def __repr__(self) -> str:
        return str(self)
