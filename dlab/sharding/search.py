"""The strategies of a whole network that communicate least: dynamic programming along its operators.

After each operator only two things matter about earlier decisions: the layouts of tensors that later operators still
need, and the cost so far. Among decisions with the same layouts only the cheapest is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from dlab.layout import Placed, replicated
from dlab.sharding.candidates import LATENCY, Candidate, Traffic, candidates, canonical, traffic
from dlab.sharding.graph import Node, Operand
from dlab.sharding.home import Home

BEAM = 200  # partial decisions that are kept after each operator; of more, the cheapest
_WORK_BITS = 50  # of a cost, the lowest: work per rank decides only where communication is equal
Key = tuple[Any, ...]


@dataclass
class Decision:
    """A strategy for each operator so far: the last one, and the decision that it continues."""

    cost: int
    memory: int
    candidate: Candidate | None = None
    before: Decision | None = None

    def chosen(self) -> list[Candidate]:
        """Return the candidates in the order of the operators."""
        found: list[Candidate] = []
        last: Decision | None = self
        while last is not None and last.candidate is not None:
            found.append(last.candidate)
            last = last.before
        return found[::-1]


@dataclass
class Effect:
    """What one candidate adds to a decision, and what is known after it."""

    cost: int
    memory: int
    candidate: Candidate
    known: dict[Key, Any]


@dataclass
class Search:
    """The operators of a network with their candidates, and what their tensors cost on the way between them.

    An operator has at most `MOST` candidates, and at most `BEAM` partial decisions go on after it, so that the work
    grows only linearly with their number. If neither bound is reached, the result is optimal (`exact`).
    """

    nodes: Sequence[Node]
    ranks: int
    memory: int | None = None
    planner: str = "rules"
    latency: int = LATENCY
    held: int = 0  # bytes of parameters whose layout is known already
    exact: bool = True  # whether nothing was left out
    options: list[list[Candidate]] = field(default_factory=list)
    _prices: dict[Key, Traffic] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known: dict[Key, tuple[list[Candidate], bool]] = {}
        for node in self.nodes:
            if node.signature not in known:
                known[node.signature] = candidates(node, self.ranks, self.planner)
            found, all_of_them = known[node.signature]
            self.options.append(found)
            self.exact &= all_of_them
        readers: dict[Key, list[int]] = {}
        for number, node in enumerate(self.nodes):
            for slot in dict.fromkeys(slot for each in node.operands for slot in _slots(each)):
                readers.setdefault(slot, []).append(number)
        self._readers = readers
        self._targets = {
            (number, each.tensor): {
                (option.found.inputs[place], option.found.varying[place]) for option in self.options[number]
            }
            for number, node in enumerate(self.nodes)
            for place, each in enumerate(node.operands)
            if len(readers["moved", each.tensor]) > 1
        }

    # what one operator adds

    def charge(self, number: int, candidate: Candidate, known: dict[Key, Any]) -> tuple[Traffic, int]:
        """Return what an operator sends and the memory of parameters that it is the first to use.

        `known` says where tensors are and which have been moved where; what this operator changes is noted in it.
        """
        sent, memory = candidate.own, 0
        found = candidate.found
        for each, target, varying in zip(self.nodes[number].operands, found.inputs, found.varying, strict=True):
            source = self._source(each, target, known)
            if source is None:  # the first operator that uses a parameter decides where it lives
                source = known["parameter", id(each.parameter)] = canonical(target)[0]
                memory += parameter_memory(each.parameter, target)
            moved = known.get(("moved", each.tensor)) or ()
            if (target, varying) in moved:
                continue
            price = self.price(each, source, *canonical(target, varying))
            if price.collectives:
                known["moved", each.tensor] = (*moved, (target, varying))
                sent = sent.plus(price)
        known["made", number] = canonical(candidate.result)[0]
        return sent, memory

    def _source(self, operand: Operand, target: Placed, known: dict[Key, Any]) -> Placed | None:
        if operand.producer is not None:
            return known["made", operand.producer]
        if operand.parameter is not None:
            return operand.parameter.placed or known.get(("parameter", id(operand.parameter)))
        return operand.placed or replicated(target.layout, len(operand.shape))

    def price(self, operand: Operand, source: Placed, target: Placed, varying: tuple[str, ...]) -> Traffic:
        """Return what it costs to move a tensor; computed once for each kind of move."""
        key = source, target, varying, operand.shape, operand.itemsize, operand.gradient
        if key not in self._prices:
            self._prices[key] = traffic(*key, self.planner)
        return self._prices[key]

    # all of them together

    def run(self) -> list[Candidate]:
        """Return the cheapest strategy of each operator that the memory allows."""
        least = [self.held + more for more in self._least_memory()]
        if self.memory is not None and least[0] > self.memory:
            raise ValueError(
                f"no strategy fits into memory={self.memory} bytes per rank: the parts of the parameters and their "
                f"gradients take at least {least[0]} bytes on each of {self.ranks} ranks"
            )
        states: dict[Key, list[Decision]] = {(): [Decision(0, self.held)]}
        slots: list[Key] = []
        for number in range(len(self.nodes)):
            after = self._live(number, slots)
            states = self._step(number, states, slots, after, least[number + 1] - self.held)
            slots = after
        return min((each for found in states.values() for each in found), key=_order).chosen()

    def _least_memory(self) -> list[int]:
        """Return for each operator the least memory of the parameters that it and later ones are the first to use."""
        seen: set[int] = set()
        least: list[int] = []
        for node, options in zip(self.nodes, self.options, strict=True):
            new = []
            for number, each in enumerate(node.operands):
                home = each.parameter
                if home is not None and home.placed is None and id(home) not in seen:
                    seen.add(id(home))
                    new.append((number, home))
            least.append(
                min(
                    sum(parameter_memory(home, option.found.inputs[number]) for number, home in new)
                    for option in options
                )
            )
        return [sum(least[number:]) for number in range(len(least) + 1)]

    def _live(self, number: int, slots: Iterable[Key]) -> list[Key]:
        """Return what a later operator still reads, of what was known before this one and what it makes."""
        own = dict.fromkeys([*slots, ("made", number), *(s for o in self.nodes[number].operands for s in _slots(o))])
        return [slot for slot in own if (read := self._readers.get(slot)) and read[-1] > number]

    def _step(
        self, number: int, states: dict[Key, list[Decision]], slots: list[Key], after: list[Key], rest: int
    ) -> dict[Key, list[Decision]]:
        reads = {slot for each in self.nodes[number].operands for slot in _slots(each)}
        read = [place for place, slot in enumerate(slots) if slot in reads]
        made: dict[Key, list[Effect]] = {}
        limit, kept_ones = float("inf") if self.memory is None else self.memory, 0
        # a slot of `after` is as it was, by its place in the old key, or as this operator leaves it
        kept = [slots.index(slot) if slot in slots and slot not in reads else None for slot in after]
        pairs: list[tuple[int, int, int, Key, Decision, Effect]] = []
        for key, decisions in states.items():
            seen = tuple(key[place] for place in read)
            if seen not in made:
                made[seen] = self._effects(number, {slots[place]: key[place] for place in read}, after)
            for each in decisions:
                pairs += [
                    (each.cost + effect.cost, memory, len(pairs) + place, key, each, effect)
                    for place, effect in enumerate(made[seen])
                    if (memory := each.memory + effect.memory) + rest <= limit
                ]
        pairs.sort(key=_first_three)  # so that what comes first of those that agree is the cheapest
        found: dict[Key, list[Decision]] = {}
        for count, (cost, memory, _, key, before, effect) in enumerate(pairs):
            new = tuple(
                effect.known.get(slot) if place is None else key[place] for slot, place in zip(after, kept, strict=True)
            )
            same = found.setdefault(new, [])
            if not same or (self.memory is not None and memory < same[-1].memory):
                same.append(Decision(cost, memory, effect.candidate, before))
                kept_ones += 1
                if kept_ones == BEAM and count < len(pairs) - 1:
                    self.exact = False
                    break
        return found

    def _effects(self, number: int, known: dict[Key, Any], after: list[Key]) -> list[Effect]:
        """Return what the best candidate of each outcome adds."""
        best: dict[Key, Effect] = {}
        for option in self.options[number]:
            now = dict(known)
            sent, memory = self.charge(number, option, now)
            cost = sent.cost(self.latency) << _WORK_BITS | option.work
            for slot in after:
                if slot[0] == "moved" and now.get(slot):
                    now[slot] = self._useful(number, slot, now[slot])
            outcome = (memory if self.memory is not None else 0, *(now.get(slot) for slot in after))
            if outcome not in best or (cost, memory) < (best[outcome].cost, best[outcome].memory):
                best[outcome] = Effect(cost, memory, option, now)
        return list(best.values())

    def _useful(self, number: int, slot: Key, moves: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return those of a tensor's moves that a later operator might have to make as well."""
        later = [reader for reader in self._readers[slot] if reader > number]
        return tuple(each for each in moves if any(each in self._targets[reader, slot[1]] for reader in later))

    # what else could have been

    def traffic(self, chosen: Sequence[Candidate], numbers: Iterable[int] | None = None) -> list[tuple[Traffic, int]]:
        """Return what each operator sends, and its parameters' memory; with `numbers`, of these operators only."""
        known: dict[Key, Any] = {("made", number): canonical(each.result)[0] for number, each in enumerate(chosen)}
        wanted = range(len(self.nodes)) if numbers is None else sorted(numbers)
        return [self.charge(number, chosen[number], known) for number in wanted]

    def second(self, chosen: Sequence[Candidate], number: int) -> tuple[Candidate, int] | None:
        """Return the best other strategy of one operator, all others as chosen, and the bytes that it sends more."""
        near = {number, *self._readers.get(("made", number), ())}
        for each in self.nodes[number].operands:
            near |= {reader for slot in _slots(each) if slot[0] != "made" for reader in self._readers[slot]}
        total = sum(memory for _, memory in self.traffic(chosen)) if self.memory is not None else 0
        before = self.traffic(chosen, near)
        found: list[tuple[int, int, Candidate]] = []
        for option in self.options[number]:
            if option is chosen[number]:
                continue
            after = self.traffic([*chosen[:number], option, *chosen[number + 1 :]], near)
            memory = total + sum(a[1] - b[1] for a, b in zip(after, before, strict=True))
            if self.memory is None or memory <= self.memory:
                more = sum(a[0].bytes - b[0].bytes for a, b in zip(after, before, strict=True))
                cost = sum(each.cost(self.latency) for each, _ in after)
                found.append((cost << _WORK_BITS | option.work, more, option))
        if not found:
            return None
        _, more, option = min(found, key=lambda each: each[0])
        return option, more


def parameter_memory(home: Home | None, placed: Placed) -> int:
    """Return the bytes that a rank needs for its part of a parameter, and for the gradient of that part."""
    assert home is not None
    held = prod(placed.local_shape(home.shape)) * home.parameter.element_size()
    return held * (2 if home.parameter.requires_grad else 1)


def _slots(operand: Operand) -> list[Key]:
    """Return the part of the state that concerns an operand: its layout, and the layouts to which it has been moved."""
    found: list[Key] = [("moved", operand.tensor)]
    if operand.producer is not None:
        found.append(("made", operand.producer))
    if operand.parameter is not None:
        found.append(("parameter", id(operand.parameter)))
    return found


def _order(decision: Decision) -> tuple[int, int]:
    return decision.cost, decision.memory


def _first_three(pair: tuple[Any, ...]) -> tuple[Any, ...]:
    return pair[:3]
