"""Multi-Token Prediction (MTP) in Megatron's own trainer: its arguments and its log."""

from __future__ import annotations

import math
from argparse import Namespace

from megatron.core.transformer.mtp_objective.metrics import (
    MTPMetrics,
    models_with_loss,
    mtp_metrics,
)
from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer
from megatron.training.utils import print_rank_last


def check_mtp_arguments(args: Namespace) -> None:
    """Refuse flags that could only fail once training has started.

    Raises:
        ValueError: what is wrong and which flag to change.
    """
    if args.mtp_isolated_loss and not args.mtp_num_layers:
        raise ValueError(
            "--mtp-isolated-loss isolates MTP heads, but there are none: "
            "add --mtp-num-layers, or drop --mtp-isolated-loss."
        )
    if (
        args.mtp_num_layers
        and args.mtp_loss_normalization == "global"
        and not args.calculate_per_token_loss
    ):
        raise ValueError(
            "--mtp-loss-normalization global needs the number of targets in the global batch, "
            "which this trainer only knows with per-token losses: add --calculate-per-token-loss, "
            "or drop --mtp-loss-normalization."
        )


def log_mtp_metrics(model: list, iteration: int) -> None:
    """Write what the heads have done since the last call to the log, TensorBoard and W&B.

    Every rank must call it; ranks without the loss of a single model with MTP do nothing.

    Args:
        model: the trainer's model chunks.
        iteration: the step of the writers.
    """
    owners = models_with_loss(model)
    if len(owners) != 1:
        return
    metrics = mtp_metrics(owners[0])
    writer, wandb_writer = get_tensorboard_writer(), get_wandb_writer()
    for name, value in metrics.as_dict().items():
        if writer is not None:
            writer.add_scalar(name, value, iteration)
        if wandb_writer is not None:
            wandb_writer.log({name: value}, iteration)
    print_rank_last(mtp_log_line(metrics, iteration))


def mtp_log_line(metrics: MTPMetrics, iteration: int) -> str:
    """One line, in the form of the trainer's own."""
    parts = [f" MTP heads at iteration {iteration:8d}"]
    for depth in range(metrics.num_depths):
        parts.append(
            f"depth {depth + 1} loss: {metrics.losses[depth]:.6E}, "
            f"acceptance: {100 * metrics.acceptance[depth]:.2f}%, "
            f"targets: {metrics.supervised_tokens[depth]}"
        )
    parts.append(f"accepted length: {metrics.accepted_length:.3f}")
    if not math.isnan(metrics.expected_accepted_length):
        expected = ", ".join(f"{100 * value:.2f}%" for value in metrics.expected_acceptance)
        parts.append(
            f"expected acceptance: {expected}, "
            f"accepted length: {metrics.expected_accepted_length:.3f}"
        )
    return " | ".join(parts) + " |"
