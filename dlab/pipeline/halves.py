"""The backward pass in two halves: the gradients of a stage's inputs first, those of its weights when there is time.

The stage before waits for the first half only, so zero-bubble schedules do the second half where a rank would wait.
Taught in `08_pipeline.ipynb`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Grads = Sequence[torch.Tensor]


class Halves:
    """The backward pass of one graph: `input_gradients()`, and later `add_weight_gradients()`.

    On its way to the inputs, the first half passes every node that also has a weight (of a linear layer, or of a sum
    with a learned position). It keeps the gradient that arrives there, and the second half starts from each of these
    nodes and goes to their weights alone, so no product is computed twice. A weight that is used at several nodes gets
    its gradient from a pass through the whole graph instead, which computes gradients of activations a second time.

    The first half looks at every node of the graph in Python, which costs about a microsecond for each. Until the
    second half has run, all tensors that the graph has saved stay in memory.
    """

    def __init__(self, outputs: Sequence[GradientEdge], gradients: Grads, inputs: Sequence[torch.Tensor]) -> None:
        self._outputs, self._gradients, self._inputs = outputs, gradients, inputs
        self._arrived: dict[Node, Sequence[torch.Tensor | None]] = {}  # by node: the gradients of its outputs
        self._weights: dict[Node, list[torch.Tensor]] = {}  # by node: those that only it leads to
        self._others: list[torch.Tensor] = []  # the other weights
        self._find_weights()

    def input_gradients(self) -> list[torch.Tensor]:
        """Compute the gradients of the inputs; zeros for one that the outputs do not depend on."""
        hooks = [node.register_prehook(self._keeping(node)) for node in self._weights]
        try:
            found = torch.autograd.grad(
                self._outputs, self._inputs, self._gradients, retain_graph=True, allow_unused=True
            )
        finally:
            for hook in hooks:
                hook.remove()
        return [torch.zeros_like(x) if grad is None else grad for grad, x in zip(found, self._inputs, strict=True)]

    def add_weight_gradients(self) -> None:
        """Compute the gradients of the weights, and add them to what is in `.grad`."""
        if self._others:
            torch.autograd.backward(self._outputs, self._gradients, retain_graph=True, inputs=self._others)
        for node, weights in self._weights.items():
            arrived = [(GradientEdge(node, n), grad) for n, grad in enumerate(self._arrived[node]) if grad is not None]
            if arrived:
                torch.autograd.backward([edge for edge, _ in arrived], [grad for _, grad in arrived], inputs=weights)

    def _keeping(self, node: Node) -> Callable[[Sequence[torch.Tensor | None]], None]:
        def keep(gradients: Sequence[torch.Tensor | None]) -> None:
            self._arrived[node] = gradients

        return keep

    def _find_weights(self) -> None:
        """Divide the weights among the nodes on the way to the inputs that lead to them directly."""
        inputs = {get_gradient_edge(x).node for x in self._inputs}
        order = _children_first([edge.node for edge in self._outputs])
        on_the_way = set[Node]()
        leaves: dict[Node, dict[int, torch.Tensor]] = {}  # by node that is not on the way: the weights that it leads to
        found: dict[Node, dict[int, torch.Tensor]] = {}  # by node on the way: the weights that it leads to directly
        for node in order:
            children = [child for child, _ in node.next_functions if child is not None]
            if node in inputs or not on_the_way.isdisjoint(children):
                on_the_way.add(node)
            below = {key: each for child in children for key, each in leaves.get(child, {}).items()}
            if (leaf := getattr(node, "variable", None)) is not None and node not in inputs:
                below[id(leaf)] = leaf
            if below:
                (found if node in on_the_way else leaves)[node] = below
        nodes: dict[int, set[Node]] = {}
        weights: dict[int, torch.Tensor] = {}
        roots = {edge.node for edge in self._outputs}
        for node, below in [*found.items(), *((root, leaves[root]) for root in roots if root in leaves)]:
            for key, weight in below.items():
                nodes.setdefault(key, set()).add(node)
                weights[key] = weight
        for key, weight in weights.items():
            node = next(iter(nodes[key]))
            if len(nodes[key]) == 1 and node in on_the_way:
                self._weights.setdefault(node, []).append(weight)
            else:
                self._others.append(weight)


def _children_first(roots: Sequence[Node]) -> list[Node]:
    """Return all nodes of a graph, each after those that its gradient goes to."""
    order: list[Node] = []
    seen = set[Node]()
    stack = [(root, False) for root in roots]
    while stack:
        node, entered = stack.pop()
        if entered:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None)
    return order
