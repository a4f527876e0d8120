"""The kinds of events, each with its fields: the language in which workers tell and views listen.

An emitter fills in one of these dictionaries, a view reads it, and mypy holds both to what is written here. They are
plain dictionaries while a program runs, so that a description costs nothing. `dlab.views.event_kinds()` shows them as
a table. A file may hold kinds and fields that are not described here: views leave out what they cannot use.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, NamedTuple, TypedDict, get_args, get_type_hints

# What a value is: its type, and the word for it that a table and a complaint use.
Text = Annotated[str, "text"]
Sentence = Annotated[str, "sentence"]
Name = Annotated[str, "name"]
Anything = Annotated[Any, "anything"]
Rank = Annotated[int, "rank"]
RankList = Annotated[list[int], "list of ranks"]
Count = Annotated[int, "count"]
CountList = Annotated[list[int], "list of counts"]
Sizes = Annotated[list[int], "list of sizes"]
LabelList = Annotated[list[int | str], "list of labels"]
Spans = Annotated[list[tuple[int, int]], "list of starts and stops"]
NormsByLayer = Annotated[dict[str, float], "numbers by layer"]
BytesByName = Annotated[dict[str, int], "counts by name"]
Number = Annotated[float, "number"]
WholeNumber = Annotated[int, "whole number"]
Ordinal = Annotated[int, "whole number from 0 on"]
Seconds = Annotated[float, "number of seconds"]
Moment = Annotated[float, "number of seconds"]
ActionText = Annotated[str, "action"]
ActionList = Annotated[list[str], "list of actions"]
MomentList = Annotated[list[float], "list of times"]


class LogData(TypedDict, total=False):
    """What a worker has logged with `dlab.log`, mostly once a step; it may have any other fields as well."""

    step: Annotated[WholeNumber, "The step that has just ended, counted from 0."]
    epoch: Annotated[Count, "The pass over the data that the step belongs to, counted from 0."]
    loss: Annotated[Number, "The mean loss of this rank's batch."]
    samples: Annotated[Count, "How many samples this rank has learned from in the step."]
    compute: Annotated[Seconds, "How long this rank has computed in the step."]
    wait: Annotated[Seconds, "How long it has waited in the step, for other ranks or for servers."]
    delay: Annotated[Seconds, "How long `run.delay` has made it sleep before the step."]
    staleness: Annotated[CountList, "Of each update of the step: by how many updates its gradient came too late."]
    held: Annotated[BytesByName, "The bytes of parameters, gradients and optimizer that it holds, and at most held."]
    norm: Annotated[Number, "The norm of the whole gradient of all ranks, before it was clipped."]


class Within(TypedDict, total=False):
    """The group in which something was sent; both are absent if it went between all ranks."""

    group: Annotated[RankList, "The ranks of the group in which it went; absent if that is all ranks."]
    axis: Annotated[Text, "The axis of the mesh along which the group lies, or its axes; else the group's name."]


class MessageDetails(TypedDict, total=False):
    """What is told of a message as far as it is known, without taking long to look."""

    round: Annotated[Ordinal, "How many collectives came before it on the same transport."]
    count: Annotated[Count, "How many numbers it carries."]
    begin: Annotated[Count, "At which number of a longer tensor they begin."]
    of: Annotated[Count, "How many numbers that longer tensor has."]
    low: Annotated[Number, "The smallest of the numbers."]
    high: Annotated[Number, "The largest of them."]


class MessageData(Within, MessageDetails):
    """A tensor went from one rank to another; told once, by its sender, or by the worker if one end is a server."""

    source: Annotated[Rank, "Who sent it; servers count on after the ranks."]
    destination: Annotated[Rank, "Who received it."]
    bytes: Annotated[Count, "How long it is."]
    start: Annotated[Moment, "When sending it began, since 1970."]
    end: Annotated[Moment, "When it had been sent."]
    phase: Annotated[Text, "The part of the algorithm that it belongs to; empty if nobody has said."]
    step: Annotated[WholeNumber, "Its step within that part, counted from 0."]


class CollectiveDetails(Within, total=False):
    """What is told of collectives only sometimes."""

    buckets: Annotated[Count, "How many pieces they came in, in all, where gradients are reduced in buckets."]


class CollectiveData(CollectiveDetails):
    """Collectives of one sort that this rank took part in and that sent no messages; short ones are told together."""

    name: Annotated[Text, "What it is: all-reduce, reduce-scatter, …; or push and pull, of weights that all share."]
    algorithm: Annotated[Text, "How it was done: through shared memory, or by which backend."]
    count: Annotated[Count, "How many of them."]
    bytes: Annotated[Count, "How long the tensors are that this rank had for them, in all."]
    seconds: Annotated[Seconds, "How long this rank has spent in them, working or waiting, in all."]
    start: Annotated[Moment, "When the first of them began, since 1970."]
    end: Annotated[Moment, "When the last of them ended."]


class GradientsData(TypedDict):
    """How large the gradients of a watched backward pass are on this rank."""

    step: Annotated[WholeNumber, "The backward pass, counted from 0."]
    norms: Annotated[NormsByLayer, "The norm of the gradient of each layer, before ranks are averaged."]


STAGES: Final = ("computed", "bucketed", "sent", "reduced", "applied")  # of a gradient's way, in their order


class GradientData(TypedDict):
    """The gradient of a watched layer has got to the next stage on its way."""

    step: Annotated[WholeNumber, "The backward pass, counted from 0."]
    layer: Annotated[Text, "The layer's name in the model."]
    stage: Annotated[Text, "The stage: one of computed, bucketed, sent, reduced and applied."]


class KnobData(TypedDict):
    """A worker has asked for a knob for the first time in a run."""

    name: Annotated[Name, "What `run.set(name, value)` calls it."]
    default: Annotated[Anything, "Its value as long as nobody has set it."]


class StateDetails(TypedDict, total=False):
    """What is told of a state only sometimes."""

    why: Annotated[Sentence, "The reason; empty where there is nothing to explain."]
    name: Annotated[Text, "What to call it, if it is a server."]


class StateData(StateDetails):
    """The state of a rank or a server; in `run.states` and in what `run.save` writes, but not in `run.events`."""

    state: Annotated[Text, "Its state: running, delayed, paused, returned, stopped, failed or dead."]


class RankWaits(TypedDict):
    """One rank in a hang."""

    rank: int
    words: str


class HangDetails(TypedDict, total=False):
    """What is told of a hang for people only."""

    seconds: Annotated[Seconds, "How long no rank has made progress."]


class HangData(HangDetails):
    """No rank makes progress; with an empty list, they do so again. Like a state, it is in `run.states`."""

    why: Annotated[Sentence, "Why it will not end by itself."]
    ranks: Annotated[Annotated[list[RankWaits], "list of waiting ranks"], "Which rank waits for what, in words."]


class ShardDetails(TypedDict, total=False):
    """What is told of a shard where its samples have labels, or more than one data set is cut."""

    name: Annotated[Text, "The name of the data set."]
    histogram: Annotated[CountList, "How many samples it has of each label."]
    labels: Annotated[LabelList, "The labels, if they are not 0, 1, 2, …"]


class ShardData(ShardDetails):
    """The samples of a data set that a rank holds."""

    samples: Annotated[Count, "How many they are."]


class SliceData(TypedDict):
    """The part of a tensor that a rank holds."""

    tensor: Annotated[Text, "The tensor's name."]
    shape: Annotated[Sizes, "The shape of the whole."]
    slice: Annotated[Spans, "Where the part begins and ends, for each dimension."]


# of an action of a pipeline: its stage, what it does (F forward, B backward, I and W the halves of a backward, or a
# message), and its micro-batch
ACTION_FORM: Final = re.compile(r"([0-9]{1,9})(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)([0-9]{1,9})")


class ActionData(TypedDict):
    """A rank has carried out an action of a pipeline's schedule."""

    action: Annotated[ActionText, "The action, as in a schedule: 2F0 is stage 2, forward, micro-batch 0."]
    stage: Annotated[Ordinal, "The stage of the model."]
    microbatch: Annotated[Ordinal, "The micro-batch of the step."]
    start: Annotated[Moment, "When it began, since 1970."]
    end: Annotated[Moment, "When it was done."]
    step: Annotated[WholeNumber, "The step of the pipeline, counted from 0."]


class ScheduleData(TypedDict):
    """What a rank of a pipeline is to do in every step, and when, if messages take no time; told once by each rank."""

    name: Annotated[Text, "The schedule's name; empty for a table of one's own."]
    actions: Annotated[ActionList, "The rank's actions, in their order."]
    starts: Annotated[MomentList, "When each begins, if a forward of the whole rank takes 1 and a backward 2."]
    ends: Annotated[MomentList, "When each is done, likewise."]


LOG: Final = "log"
MESSAGE: Final = "message"
COLLECTIVE: Final = "collective"
GRADIENTS: Final = "gradients"
GRADIENT: Final = "gradient"
KNOB: Final = "knob"
STATE: Final = "state"
HANG: Final = "hang"
SHARD: Final = "shard"
SLICE: Final = "slice"
ACTION: Final = "action"
SCHEDULE: Final = "schedule"


class KindField(NamedTuple):
    """A field of a kind: its name, what its value is, a sentence on it, and whether it is always there."""

    name: str
    noun: str
    sentence: str
    needed: bool


class Kind(NamedTuple):
    """A kind of event: its name, a sentence on it, its fields, and whether emitters may add others."""

    name: str
    sentence: str
    fields: tuple[KindField, ...]
    is_open: bool


def _describe(name: str, form: Any) -> Kind:
    """What the annotations of a dictionary say, the fields that are always there first."""
    fields = []
    for field, hint in get_type_hints(form, include_extras=True).items():
        _, noun, sentence = get_args(hint)
        fields.append(KindField(field, noun, sentence, field in form.__required_keys__))
    return Kind(name, form.__doc__, tuple(sorted(fields, key=lambda field: not field.needed)), form is LogData)


_FORMS = {
    LOG: LogData,
    MESSAGE: MessageData,
    COLLECTIVE: CollectiveData,
    GRADIENTS: GradientsData,
    GRADIENT: GradientData,
    KNOB: KnobData,
    STATE: StateData,
    HANG: HangData,
    SHARD: ShardData,
    SLICE: SliceData,
    ACTION: ActionData,
    SCHEDULE: ScheduleData,
}
KINDS: dict[str, Kind] = {name: _describe(name, form) for name, form in _FORMS.items()}
