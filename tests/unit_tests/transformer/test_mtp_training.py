"""Megatron's own trainer: flags that cannot work are refused before it starts, and the log line.

    python -m pytest tests/unit_tests/transformer/test_mtp_training.py
"""

import sys

import pytest
import torch

from tests.support import has_gpu, prepare, standin

prepare()

from megatron.training.arguments import parse_args, validate_args

BASE = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
    " --max-position-embeddings 32 --micro-batch-size 1 --lr 1e-3 --train-iters 2 --mock-data"
    " --position-embedding-type rope --transformer-impl local --no-persist-layer-norm"
    " --no-gradient-accumulation-fusion --tokenizer-type NullTokenizer --vocab-size 127"
)


@pytest.fixture
def validated(monkeypatch):
    """Parse and validate as the trainer does, without starting anything."""
    if not has_gpu():
        standin.install_training()

    def validate(flags: str):
        monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *BASE.split(), *flags.split()])
        return validate_args(parse_args())

    return validate


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--mtp-num-layers 2",
        "--mtp-num-layers 2 --mtp-isolated-loss --mtp-loss-mask-mode path",
        "--mtp-num-layers 1 --mtp-loss-normalization global --calculate-per-token-loss",
        "--mtp-loss-normalization global",  # says nothing without heads
    ],
)
def test_flags_that_work_are_accepted(validated, flags):
    args = validated(flags)
    assert args.mtp_isolated_loss == ("--mtp-isolated-loss" in flags)


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--mtp-isolated-loss",
            "--mtp-isolated-loss isolates MTP heads, but there are none: add --mtp-num-layers",
        ),
        ("--mtp-num-layers 0 --mtp-isolated-loss", "but there are none"),
        (
            "--mtp-num-layers 2 --mtp-loss-normalization global",
            "only knows with per-token losses: add --calculate-per-token-loss",
        ),
    ],
)
def test_flags_that_could_only_fail_later_are_refused(validated, flags, message):
    with pytest.raises(ValueError, match=message):
        validated(flags)


def test_the_log_line_has_every_depth_and_the_accepted_length():
    from megatron.core.transformer.mtp_objective.metrics import MTPMetrics
    from megatron.training.mtp_training import mtp_log_line

    sums = torch.tensor([6.0, 4, 3, 4, 9.0, 3, 0, 3, 10, 5], dtype=torch.float64)
    assert mtp_log_line(MTPMetrics(sums), 7) == (
        " MTP heads at iteration        7"
        " | depth 1 loss: 1.500000E+00, acceptance: 75.00%, targets: 4"
        " | depth 2 loss: 3.000000E+00, acceptance: 0.00%, targets: 3"
        " | accepted length: 2.000 |"
    )


def test_the_log_line_ends_with_what_is_expected_where_a_teacher_was_asked():
    from megatron.core.transformer.mtp_objective.metrics import MTPMetrics
    from megatron.training.mtp_training import mtp_log_line

    sums = torch.tensor([6.0, 4, 3, 4, 9.0, 3, 0, 3, 10, 5], dtype=torch.float64)
    expected = torch.tensor([3.2, 4, 1.5, 3, 9, 5], dtype=torch.float64)
    line = mtp_log_line(MTPMetrics(sums, expected), 7)
    assert line.startswith(mtp_log_line(MTPMetrics(sums), 7).removesuffix(" |"))
    assert line.endswith(" | expected acceptance: 80.00%, 50.00%, accepted length: 1.800 |")


def test_a_model_without_heads_logs_nothing(capsys):
    from megatron.training.mtp_training import log_mtp_metrics

    log_mtp_metrics([torch.nn.Linear(2, 2)], 1)
    assert capsys.readouterr().out == ""
