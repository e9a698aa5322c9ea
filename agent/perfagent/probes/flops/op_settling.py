"""Completes the convolutions and attention of a recorded step by what autograd's graph, modules, or others of the same shapes
know."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from perfagent.measure.flops.op import CONVOLUTIONS, GRADIENTS, Op, Shapes
from perfagent.measure.flops.op_reading import Convolution, Operators, Results

__all__ = ["results_by_gradients", "settle", "settle_convolutions"]


def results_by_gradients(backward: Operators) -> Results:
    """Returns the results of convolutions that their gradients, which are settled, show."""
    results: Results = {}
    for op, times in backward.ran.items():
        if op.name == GRADIENTS:
            results.setdefault(op.shapes[1:], Counter())[op.shapes[0], op.transposed] += times
    return results


def settle_convolutions(operators: Operators, *sources: Results) -> None:
    """Gives convolutions their results: those of a source that knows as many of the same sizes as there are, or only one
    result for them."""
    for op, times in [*operators.ran.items()]:
        if op.name in CONVOLUTIONS:
            known = [source[op.shapes] for source in sources if op.shapes in source]
            results = next((one for one in known if one.total() == times or len(one) == 1), None)
            if results is not None:
                del operators.ran[op]
                for (out, transposed), count in results.items():
                    settled = op._replace(shapes=(*op.shapes, out), transposed=transposed)
                    operators.ran[settled] += times * count // results.total()


def settle(
    operators: Operators,
    nodes: Mapping[int, Sequence[Convolution | bool]],
    causal: defaultdict[Shapes, bool | None],
) -> None:
    """Adds what autograd's graph, or else others of the same shapes, know about gradients of convolutions and about
    attention. nodes: by number, those of the outermost pass first; for attention, whether it is causal. causal: the same
    by shapes of query and key, known so far."""
    given = set()
    for number, op in reversed(operators.numbered):  # of several with one number, the last has the node
        settled = _settled(op, nodes.get(number, ()) if (op.name, number) not in given else ())
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


def _settled(op: Op, nodes: Sequence[Convolution | bool]) -> Op:
    """Completes an attention, or the gradients of a convolution. nodes: those that may belong to it."""
    for node in nodes:
        if isinstance(node, bool):
            if op.attends:
                return op._replace(causal=node)
        elif op.name == GRADIENTS and node.out == op.shapes[0]:
            return op._replace(transposed=node.transposed, gradients=node.gradients)
    return op
