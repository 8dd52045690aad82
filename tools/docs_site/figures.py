"""The figures of docs/concepts.md, drawn from what the code itself computes.

    python -m tools.docs_site figures      # writes docs/figures/*.svg

Shifts, owners and weights are asked from `megatron.core.transformer.mtp_objective`, so a figure
cannot say something else than the code. The files are the same on every run with the same
matplotlib.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.mtp_objective import (
    WEIGHTINGS,
    Targets,
    depth_targets,
    pack_trajectories,
    pad_trajectories,
    prediction_aligned_targets,
    weigh_microbatches,
)

FOLDER = Path("docs") / "figures"
_RANKS = ["#cfe0f3", "#fbdcb8", "#d3ecd0", "#ecd4ea"]
_GREY, _DARK, _CUT = "#eeeeee", "#333333", "#b3261e"
_SETTINGS = {
    "svg.hashsalt": "mtp",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _DARK,
    "axes.edgecolor": _DARK,
}


def draw(folder: Path) -> list[Path]:
    """Write every figure; returns their paths.

    Args:
        folder: where to; made if it is not there.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    from tools.docs_site.diagram import isolation

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    drawings = {"isolation": isolation, "depths": depths, "zigzag": zigzag, "weights": weights}
    for name, drawing in drawings.items():
        with matplotlib.rc_context(_SETTINGS):
            figure = drawing(pyplot)
            path = folder / f"{name}.svg"
            figure.savefig(path, format="svg", metadata={"Date": None})
            pyplot.close(figure)
            paths.append(path)
    return paths


def depth_rows() -> dict[str, list[str]]:
    """The rows of the figure of depths: two packed sequences, the ends of which were sampled.

    A "–" stands where nothing counts.
    """
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15, 20, 21, 22, 23]])
    sampled = torch.tensor([[0, 0, 1, 1, 1, 1, 0, 0, 1, 1]])
    ends = torch.tensor([0, 6, 10], dtype=torch.int32)
    packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends)
    labels, mask = prediction_aligned_targets(tokens, sampled, packed)
    targets = depth_targets(labels, mask, tokens, 2, packed_seq_params=packed)

    def row(values: torch.Tensor, counts: torch.Tensor) -> list[str]:
        return [str(int(v)) if c else "–" for v, c in zip(values[0], counts[0])]

    rows = {"token": row(tokens, torch.ones_like(tokens)), "policy": row(labels, mask)}
    for k, (values, counts) in enumerate(zip(targets.labels_DBS, targets.masks_DBS), start=1):
        rows[f"depth {k}"] = row(values, counts)
    rows["sampled"] = row(tokens, sampled)
    return rows


def depths(pyplot: Any) -> Any:
    """Which target each depth has at each position."""
    rows = depth_rows()
    sampled = rows.pop("sampled")
    figure, axis = _canvas(pyplot, 5.8, 2.4, (-2.6, 10.1), (-4.6, 1.2))
    for index, (name, values) in enumerate(rows.items()):
        y = -index - (0.25 if index else 0)
        axis.text(-0.7, y, name, ha="right", va="center")
        for x, value in enumerate(values):
            colour = _GREY if value == "–" else _RANKS[0] if index == 1 else _RANKS[1]
            if index == 0:
                colour = "white" if sampled[x] == "–" else _RANKS[2]
            _cell(axis, x, y, value, colour)
    axis.plot([5.5, 5.5], [-3.8, 0.6], color=_CUT, linewidth=1.5, linestyle=(0, (3, 2)))
    axis.text(2.5, 0.85, "first sequence", ha="center", va="center")
    axis.text(7.5, 0.85, "second sequence", ha="center", va="center")
    legend = [("white", "prompt"), (_RANKS[2], "sampled"), (_GREY, "does not count")]
    for x, (colour, text) in zip((-0.4, 2.6, 5.8), legend):
        _cell(axis, x, -4.15, "", colour, size=0.4)
        axis.text(x + 0.4, -4.15, text, ha="left", va="center", fontsize=9)
    return figure


def owners(cp_size: int, lengths: list[int], packed: bool) -> list[int]:
    """The rank that owns each padded position, as the trainer's helpers split a batch."""
    tokens = [torch.arange(length) for length in lengths]
    masks = [torch.ones_like(sequence) for sequence in tokens]
    found: dict[tuple[int, int], int] = {}
    for rank in range(cp_size):
        split = dict(cp_size=cp_size, cp_rank=rank)
        if packed:
            part = pack_trajectories(tokens, masks, **split)
            starts = (part.position_ids[0].diff(prepend=torch.tensor([10**6])) < 0).cumsum(0)
            for sequence, position in zip(starts.tolist(), part.position_ids[0].tolist()):
                found[_sequence(sequence, cp_size, lengths), position] = rank
        else:
            for position in pad_trajectories(tokens, masks, **split).position_ids[0].tolist():
                found[0, position] = rank
    return [found[key] for key in sorted(found)]


def _sequence(starts: int, cp_size: int, lengths: list[int]) -> int:
    """Which sequence a local run of positions belongs to: each has its tokens in one run."""
    return starts - 1 if starts <= len(lengths) else len(lengths) - 1


def zigzag(pyplot: Any) -> Any:
    """Which context-parallel rank owns which positions."""
    rows = [
        ("cp = 2", owners(2, [16], packed=False), [16]),
        ("cp = 4", owners(4, [16], packed=False), [16]),
        ("cp = 2,\npacked", owners(2, [8, 7], packed=True), [8, 7]),
    ]
    figure, axis = _canvas(pyplot, 5.8, 2.1, (-2.9, 16.2), (-6.0, 1.1))
    for index, (name, ranks, lengths) in enumerate(rows):
        y = -1.6 * index
        axis.text(-0.8, y, name, ha="right", va="center")
        real = [n < length for length in lengths for n in range(-(-length // 4) * 4)]
        for x, (rank, inside) in enumerate(zip(ranks, real)):
            _cell(axis, x, y, str(rank) if inside else "·", _RANKS[rank])
    axis.plot([7.5, 7.5], [-3.9, -2.5], color=_CUT, linewidth=1.5, linestyle=(0, (3, 2)))
    for rank in range(4):
        _cell(axis, -0.4 + 3.1 * rank, -5.0, "", _RANKS[rank], size=0.6)
        axis.text(0.3 + 3.1 * rank, -5.0, f"rank {rank}", ha="left", va="center", fontsize=9)
    axis.text(12.3, -5.0, "· padding", ha="left", va="center", fontsize=9)
    return figure


SEQUENCES = [[6], [1, 3]]
"""Targets of depth 1 in each sequence of two microbatches."""


def target_weights(weighting: str) -> list[list[float]]:
    """The weight of one target of depth 1, per microbatch and sequence."""
    batches = []
    for counts in SEQUENCES:
        tokens = [torch.arange(count + 2) for count in counts]
        padded = pad_trajectories(tokens, [torch.ones_like(sequence) for sequence in tokens])
        batches.append(Targets(padded.labels, padded.loss_mask))
    weighed = weigh_microbatches(batches, weighting, num_depths=1)
    found = []
    for batch, given in zip(batches, weighed):
        targets = depth_targets(batch.labels, given.loss_mask, None, 1)
        weights_BS = targets.masks_DBS[0] / given.mtp_loss_normalizer[0]
        found.append([row[row > 0][0].item() for row in weights_BS])
    return found


def weights(pyplot: Any) -> Any:
    """How much one target of each sequence weighs under each weighting."""
    figure, axes = pyplot.subplots(1, 3, figsize=(5.8, 2.5), sharey=True, layout="constrained")
    counts = [count for batch in SEQUENCES for count in batch]
    edges = [sum(counts[:n]) for n in range(len(counts))]
    for axis, weighting in zip(axes, WEIGHTINGS):
        heights = [weight for batch in target_weights(weighting) for weight in batch]
        for edge, count, height, colour in zip(edges, counts, heights, (_RANKS[0], *_RANKS[1:3])):
            axis.bar(
                [edge + n for n in range(count)], [height] * count, width=0.86, align="edge",
                color=colour, edgecolor=_DARK, linewidth=0.7,
            )  # fmt: skip
        axis.axvline(SEQUENCES[0][0] - 0.07, color=_CUT, linewidth=1.2, linestyle=(0, (3, 2)))
        axis.set_title(weighting, fontsize=10)
        axis.set_xticks([3, 6.5, 8.5], ["6", "1", "3"])
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("weight of one target")
    axes[1].set_xlabel("targets of each sequence; the dashed line parts two microbatches")
    return figure


def _canvas(pyplot: Any, width: float, height: float, x: tuple, y: tuple) -> tuple[Any, Any]:
    figure = pyplot.figure(figsize=(width, height))
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=x, ylim=y)
    axis.axis("off")
    return figure, axis


def _cell(axis: Any, x: float, y: float, text: str, colour: str, size: float = 0.92) -> None:
    from matplotlib.patches import Rectangle

    corner = (x - size / 2, y - size / 2)
    axis.add_patch(Rectangle(corner, size, size, facecolor=colour, edgecolor=_DARK, linewidth=0.7))
    axis.text(x, y, text, ha="center", va="center", fontsize=9)
