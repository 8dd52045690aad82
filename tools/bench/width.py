"""The width h of the hidden states: which one says something, and what others cost.

Per logit, the matrix products do 6 h floating-point operations, and everything else moves some
bytes. Which of the two is the time depends on h and on the machine: on the operations that it does
in the time of one byte of memory traffic, its balance. A width is alike on two machines where h over
balance is.
"""

from __future__ import annotations

import functools
import math
from typing import Callable, Iterator

import torch

from tools.bench.heads import Inputs, Objective, build_head
from tools.bench.results import Row
from tools.bench.roofline import Ceilings
from tools.bench.sizes import Sizes
from tools.bench.timing import medians
from tools.bench.trees import Pair

WIDTH = "objective time over the width h"
PRODUCTS = "the three matrix products alone"
# Qwen3.5-35B-A3B; an H200 in bf16 by its data sheet: 990 TFLOP/s, 4.8 TB/s
_GPU_WIDTH, _GPU_BALANCE = 2048, 200
_STEP = 16


def balanced(ceilings: Ceilings) -> int:
    """The width that is here what 2,048 is on a GPU, rounded up to a multiple of 16."""
    balance = ceilings.flops / ceilings.bandwidth
    return _STEP * math.ceil(_GPU_WIDTH * balance / _GPU_BALANCE / _STEP)


def measure(pair: Pair, sizes: Sizes, tick: Callable[[str], None]) -> Iterator[Row]:
    """Rows of one depth, not isolated, at the sizes with goals; and of the products alone.

    The products are ours' in chunks, in buffers that exist already: with this library of matrix
    products nothing that computes the objective is faster.
    """
    length, vocabulary = sizes.at
    for width in sizes.widths:
        tick(f"objective s={length} V={vocabulary} h={width}")
        shape = vocabulary, width, sizes.dtype
        models = {tree.name: build_head(tree, pair, *shape) for tree in pair}
        inputs = {
            share: Inputs.random(length, 1, width, vocabulary, share, sizes.dtype)
            for share in sizes.fractions
        }
        whole = inputs[sizes.fractions[0]]
        theirs = Objective(pair.upstream, models["upstream"], 1)
        ours = Objective(pair.ours, models["ours"], 1, chunk=sizes.chunk)
        calls = {str(share): functools.partial(ours, inputs[share]) for share in inputs}
        calls["upstream"] = functools.partial(theirs, whole)
        calls[PRODUCTS] = Products(whole.hidden[length:, 0], models["ours"], sizes.chunk)
        for name in list(calls):
            try:
                calls[name]()
            except torch.OutOfMemoryError:  # on a GPU; rows without upstream say so
                if name != "upstream":
                    raise
                del calls[name]
                torch.cuda.empty_cache()
            ours.release(whole)
            theirs.release(whole)
        seconds = medians(calls, sizes.repeats)
        upstream = 1e3 * seconds["upstream"] if "upstream" in seconds else None
        for what in (*map(str, inputs), PRODUCTS):
            text = what if what == PRODUCTS else f"{float(what):.0%} supervised"
            name = f"h={width} s={length} V={vocabulary} D=1, {text}"
            key = dict(h=width, what=what)
            yield Row(WIDTH, name, "ms", upstream, 1e3 * seconds[what], key=key)


class Products:
    """Logits, gradient of hidden states and of the weight, of all rows, and nothing else."""

    def __init__(self, hidden_RH: torch.Tensor, model, chunk: int):
        self._hidden_RH = hidden_RH.detach()
        self._weight_VH = model.output_layer.weight.detach()
        self._total_VH = torch.zeros_like(self._weight_VH)
        self._gradient_RH = torch.empty_like(self._hidden_RH)
        rows, columns = chunk, self._weight_VH.size(0)
        if hidden_RH.is_cuda:
            self._logits_NV = hidden_RH.new_empty(rows, columns)
        else:  # the faster order
            self._logits_NV = hidden_RH.new_empty(columns, rows).t()

    def __call__(self) -> None:
        rows = self._logits_NV.size(0)
        for hidden_NH, gradient_NH in zip(
            self._hidden_RH.split(rows), self._gradient_RH.split(rows)
        ):
            logits_NV = self._logits_NV[: hidden_NH.size(0)]
            torch.mm(hidden_NH, self._weight_VH.t(), out=logits_NV)
            torch.mm(logits_NV, self._weight_VH, out=gradient_NH)
            self._total_VH.addmm_(logits_NV.t(), hidden_NH)
