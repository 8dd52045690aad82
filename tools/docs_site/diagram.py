"""The figure of what isolation cuts."""

from __future__ import annotations

from typing import Any

_POLICY, _HEADS, _DARK, _CUT = "#cfe0f3", "#fbdcb8", "#333333", "#b3261e"
# name: (x, y, width, height, colour, text)
_BOXES = {
    "embedding": (-0.2, 2.1, 2.1, 0.9, _POLICY, "embedding"),
    "decoder": (2.9, 2.1, 1.7, 0.9, _POLICY, "decoder"),
    "output": (7.9, 2.1, 1.7, 0.9, _POLICY, "output\nlayer"),
    "depth 1": (2.9, 0.0, 1.7, 0.9, _HEADS, "head,\ndepth 1"),
    "depth 2": (5.4, 0.0, 1.7, 0.9, _HEADS, "head,\ndepth 2"),
    "loss": (7.9, 0.0, 1.7, 0.9, "white", "MTP loss"),
}
# from (x, y), to (x, y), whether isolation cuts it
_ARROWS = [
    ((1.9, 2.55), (2.9, 2.55), False),  # embedding to decoder
    ((4.6, 2.55), (7.9, 2.55), False),  # decoder to output layer
    ((9.6, 2.55), (10.6, 2.55), False),  # logits
    ((3.75, 2.1), (3.75, 0.9), True),  # hidden states enter depth 1
    ((0.85, 2.1), (0.85, 0.45), None),  # embedding down, the line goes on to depth 1
    ((0.85, 0.45), (2.9, 0.45), True),
    ((4.6, 0.45), (5.4, 0.45), False),  # depth to depth
    ((7.1, 0.45), (7.9, 0.45), False),  # depth to loss
    ((8.75, 2.1), (8.75, 0.9), True),  # output weight
]


def isolation(pyplot: Any) -> Any:
    """Boxes of the policy and of the heads; a cross where no gradient passes."""
    from matplotlib.patches import FancyBboxPatch

    figure = pyplot.figure(figsize=(5.8, 2.75))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(-0.5, 12.1), ylim=(-1.95, 3.8))
    axis.axis("off")
    for start, end, cut in _ARROWS:
        _arrow(axis, start, end, cut)
    _embedding_of_depth_2(axis)
    for x, y, width, height, colour, text in _BOXES.values():
        style = "round,pad=0,rounding_size=0.12"
        axis.add_patch(
            FancyBboxPatch(
                (x, y), width, height, boxstyle=style, facecolor=colour, edgecolor=_DARK,
                linewidth=0.9, zorder=3,
            )
        )  # fmt: skip
        axis.text(x + width / 2, y + height / 2, text, ha="center", va="center", zorder=4)
    axis.text(10.7, 2.55, "logits", ha="left", va="center")
    axis.text(4.7, 3.4, "the policy", ha="center", va="center", style="italic")
    axis.text(3.9, 1.2, "hidden\nstates", ha="left", va="center", fontsize=8)
    axis.text(8.9, 1.2, "weight", ha="left", va="center", fontsize=8)
    _cross(axis, 0.1, -1.5)
    axis.text(0.4, -1.5, "values pass, gradients of the MTP loss do not", va="center", fontsize=9)
    return figure


def _arrow(axis: Any, start: tuple, end: tuple, cut: bool | None, head: bool = True) -> None:
    style = "-" if cut is None or not head else "-|>"
    axis.annotate(
        "", xy=end, xytext=start, zorder=2,
        arrowprops=dict(arrowstyle=style, color=_DARK, linewidth=1, shrinkA=0, shrinkB=0),
    )  # fmt: skip
    if cut:
        _cross(axis, (start[0] + end[0]) / 2, (start[1] + end[1]) / 2)


def _embedding_of_depth_2(axis: Any) -> None:
    """The embedding of the tokens that depth 2 sees runs below depth 1."""
    _arrow(axis, (0.85, 0.45), (0.85, -0.7), None)
    _arrow(axis, (0.85, -0.7), (6.25, -0.7), True, head=False)
    _arrow(axis, (6.25, -0.7), (6.25, 0.0), False)


def _cross(axis: Any, x: float, y: float) -> None:
    style = dict(marker="X", markersize=9, color=_CUT, markeredgecolor="white", zorder=5)
    axis.plot([x], [y], **style)
