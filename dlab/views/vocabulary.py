"""The kinds of events as tables, for those who want to read a file of events or to log what a view draws."""

from __future__ import annotations

from collections.abc import Sequence

from dlab.data.table import Bars, Table
from dlab.kinds import KINDS, Kind, KindField


class KindTable(Table):
    """A row per kind of event: what it tells, and the names of its fields.

    >>> event_kinds()
    kind  what it tells                             fields
    knob  A worker has asked for a knob for the …   name, default
    """

    def __init__(self) -> None:
        self.rows: Sequence[Kind] = list(KINDS.values())

    def heading(self) -> list[str]:
        return ["kind", "what it tells", "fields"]

    def cells(self, row: Kind) -> list[int | str | Bars]:
        names = ", ".join([*(field.name for field in row.fields), *["…"] * row.is_open])
        return [row.name, row.sentence, names]

    def between(self, hidden: Sequence[Kind]) -> str:
        return f"… {len(hidden)} more kinds"


class FieldTable(Table):
    """A row per field of one kind: what its value is, and what it means.

    >>> event_kinds("knob")
    field    value     always  meaning
    name     name      yes     What `run.set(name, value)` calls it.
    default  anything  yes     Its value as long as nobody has set it.
    """

    def __init__(self, kind: Kind) -> None:
        self.rows: Sequence[KindField] = kind.fields

    def heading(self) -> list[str]:
        return ["field", "value", "always", "meaning"]

    def cells(self, row: KindField) -> list[int | str | Bars]:
        return [row.name, row.noun, "yes" if row.needed else "no", row.sentence]

    def between(self, hidden: Sequence[KindField]) -> str:
        return f"… {len(hidden)} more fields"


def event_kinds(kind: str | None = None) -> KindTable | FieldTable:
    """All kinds of events that dlab tells, or the fields of one of them: `event_kinds("message")`."""
    if kind is None:
        return KindTable()
    if kind not in KINDS:
        raise KeyError(f"there is no kind of event {kind!r}: use {', '.join(map(repr, KINDS))}")
    return FieldTable(KINDS[kind])
