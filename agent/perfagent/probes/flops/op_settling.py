"""Completes the convolutions and attention of a recorded step by what autograd's graph, or others of the same shapes, know."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from perfagent.measure.flops.op import CONVOLUTIONS, GRADIENTS, Op, Shapes
from perfagent.measure.flops.op_reading import Convolution, Operators, Results

__all__ = ["note_results", "settle"]


def note_results(operators: Operators, results: Results) -> None:
    """Adds the shapes of convolutions' results that their gradients show."""
    for _, op in operators.numbered:
        if op.name == GRADIENTS:
            results.setdefault(op.shapes[1:], {}).setdefault(op.shapes[0], None)


def settle(
    operators: Operators,
    nodes: Mapping[int, Sequence[Convolution | bool]],
    results: Results,
    causal: defaultdict[Shapes, bool | None],
) -> None:
    """Adds what autograd's graph, or else others of the same shapes, know about convolutions and attention.
    nodes: by number, those of the outermost pass first; for attention, whether it is causal. causal: the same by
    shapes of query and key, known so far."""
    given = set()
    for number, op in reversed(operators.numbered):  # of several with one number, the last has the node
        settled = _settled(op, nodes.get(number, ()) if (op.name, number) not in given else (), results)
        if settled.attends and settled.causal is None:
            settled = settled._replace(causal=causal[settled.attended[:2]])
        elif settled.attends:
            causal[settled.attended[:2]] = settled.causal
        if op.is_gradient:
            operators.note_passed(number, settled)
        else:
            given.add((op.name, number))
        operators.ran[settled] += 1
    operators.numbered = []


def _settled(op: Op, nodes: Sequence[Convolution | bool], results: Results) -> Op:
    """Completes a convolution, an attention or their gradients. nodes: those that may belong to it."""
    for node in nodes:
        if isinstance(node, bool):
            if op.attends:
                return op._replace(causal=node)
        elif op.name == GRADIENTS and node.out == op.shapes[0]:
            return op._replace(transposed=node.transposed, gradients=node.gradients)
        elif op.name in CONVOLUTIONS and node.fits(*op.shapes):
            return op._replace(shapes=(*op.shapes, node.out), transposed=node.transposed)
    outs = results.get(op.shapes, {}) if op.name in CONVOLUTIONS else {}
    if len(outs) != 1:  # several differ in their strides
        return op
    ((out, transposed),) = outs.items()
    return op._replace(shapes=(*op.shapes, out), transposed=transposed)
