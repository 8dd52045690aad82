"""A whole training step with the heads off and on, beside what its floating-point work implies."""

from __future__ import annotations

import functools
from typing import Callable, Iterator

import torch
from torch.utils.flop_counter import FlopCounterMode

from tools.bench.heads import Inputs, build, chunked
from tools.bench.results import Row
from tools.bench.sizes import Sizes
from tools.bench.timing import medians
from tools.bench.trees import Pair, Tree

STEP = "training step"
OFF, ON, ISOLATED = "off", "on", "isolated"
_TITLES = {OFF: "MTP off", ON: "MTP on", ISOLATED: "MTP isolated (ours chunked)"}
_SHARE = 0.25


def measure(pair: Pair, sizes: Sizes, tick: Callable[[str], None]) -> Iterator[Row]:
    """Rows of step times, and of both times and FLOPs relative to the step without heads."""
    steps = {
        (tree.name, mode): Step(pair, tree, sizes, mode)
        for tree in pair
        for mode in (OFF, ON, ISOLATED)
    }
    flops = {}
    for name, step in steps.items():  # also warms up
        tick(f"training step, {_TITLES[name[1]]}, {name[0]}")
        with FlopCounterMode(display=False) as counter:
            step()
        flops[name] = counter.get_total_flops()
    seconds = medians(steps, sizes.repeats)
    size = f"h={sizes.step_hidden} s={sizes.step_length} V={sizes.step_vocabulary} D=1, {_SHARE:.0%} supervised"
    for mode, title in _TITLES.items():
        both = (1e3 * seconds[name, mode] for name in ("upstream", "ours"))
        yield Row(STEP, f"{title}, {size}", "ms", *both, key=dict(mode=mode, what="time"))
    for what, values in (("time", seconds), ("FLOPs", flops)):
        for mode in (ON, ISOLATED):
            both = (values[name, mode] / values[name, OFF] for name in ("upstream", "ours"))
            key = dict(mode=mode, what=f"{what} over off")
            yield Row(STEP, f"{what}, {_TITLES[mode]} over off", "", *both, key=key)


class Step:
    """Forward, backward and Adam of one model.

    Args:
        pair: both trees.
        tree: whose model.
        sizes: of the model.
        mode: "off" (no heads), "on" (one depth, plain path), "isolated" (one depth cut off from the
            model: ``mtp_detach_heads`` upstream, isolated and chunked ours).
    """

    def __init__(self, pair: Pair, tree: Tree, sizes: Sizes, mode: str):
        overrides = {}
        if mode == ISOLATED and tree.name == "ours":
            overrides = {"mtp_isolated_loss": True, **chunked(tree, sizes.chunk)}
        elif mode == ISOLATED:
            overrides = {"mtp_detach_heads": True}
        self.tree = tree
        self.model = build(
            tree,
            pair,
            sizes.step_vocabulary,
            sizes.step_hidden,
            sizes.dtype,
            depths=0 if mode == OFF else 1,
            num_layers=sizes.step_layers,
            max_sequence_length=sizes.step_length,
            overrides=overrides,
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4, fused=True)
        inputs = Inputs.random(
            sizes.step_length, 0, 1, sizes.step_vocabulary, _SHARE, torch.float32
        )
        self.mask_BS = inputs.mask_BS
        positions = torch.arange(sizes.step_length, device=self.mask_BS.device)[None]
        self.forward = functools.partial(
            self.model,
            input_ids=inputs.labels_BS.roll(1, dims=-1),
            position_ids=positions,
            attention_mask=None,
            labels=inputs.labels_BS,
            loss_mask=self.mask_BS,
        )

    def __call__(self) -> None:
        """Take one step."""
        with self.tree.active():
            self.optimizer.zero_grad(set_to_none=True)
            ((self.forward() * self.mask_BS).sum() / self.mask_BS.sum()).backward()
            self.optimizer.step()
