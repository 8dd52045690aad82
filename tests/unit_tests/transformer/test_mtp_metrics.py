"""Metrics of the heads from given logits: losses, acceptance, accepted length.

    python -m pytest tests/unit_tests/transformer/test_mtp_metrics.py

Run as a script it writes the acceptance counts that Megatron's tracker gets when the cross-entropy
overwrites its logits; the last test does that on the release below the series.
"""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.support import device, parallel_world, prepare
from tests.support.release import require_acceptance_counts
from tests.support.unpatched import NoUnpatchedTree, faulty_tree, run_in_tree

prepare()

from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer.multi_token_prediction import (
    MTPLossLoggingHelper,
    process_mtp_loss,
)
from megatron.core.transformer.transformer_config import TransformerConfig

VOCABULARY = 4


@pytest.fixture
def world():
    """Groups of one rank."""
    with parallel_world() as groups:
        yield groups


def train_on_logits(logits_DSBV, labels, mask, cross_entropy, **options):
    """`process_mtp_loss` with an output layer that passes the given logits of every depth on."""
    config = TransformerConfig(
        num_layers=1, hidden_size=VOCABULARY, num_attention_heads=1, mtp_num_layers=len(logits_DSBV)
    )
    decoder_SBH = torch.zeros_like(logits_DSBV[0])
    return process_mtp_loss(
        hidden_states=torch.cat([decoder_SBH, *logits_DSBV]).requires_grad_(),
        labels=torch.tensor([labels], device=device()),
        loss_mask=torch.tensor([mask], dtype=torch.float32, device=device()),
        output_layer=lambda hidden, **_: (hidden.clone(), None),
        output_weight=None,
        runtime_gather_output=None,
        is_training=True,
        compute_language_model_loss=cross_entropy,
        config=config,
        **options,
    )


def plain_cross_entropy(labels_BS, logits_SBV):
    """Token losses [b, s] that leave their logits alone."""
    return F.cross_entropy(logits_SBV.permute(1, 2, 0), labels_BS, reduction="none")


def gradient_in_place(labels_BS, logits_SBV):
    """As Transformer Engine's: the logits' memory ends up holding their gradient."""
    losses_BS = plain_cross_entropy(labels_BS, logits_SBV.clone())
    with torch.no_grad():
        logits_SBV.copy_(logits_SBV.softmax(-1) - F.one_hot(labels_BS.T, logits_SBV.size(-1)))
    return losses_BS


def unfused(labels_BS, logits_SBV):
    """Megatron's, which exponentiates float32 logits in place."""
    return vocab_parallel_cross_entropy(logits_SBV, labels_BS.T.contiguous()).T


def fused(labels_BS, logits_SBV):
    """The same under ``cross_entropy_loss_fusion``."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    return fused_vocab_parallel_cross_entropy(logits_SBV, labels_BS.T.contiguous(), group).T


OVERWRITING = dict(gradient_in_place=gradient_in_place, unfused=unfused, fused=fused)


def counts_with(cross_entropy) -> list[float]:
    """[right, scored] of one depth whose three predictions are all right, narrowly.

    A difference of 1e-9 between logits is one in float32, and none once they are exponentiated.
    """
    narrow = torch.tensor([1e-9 if token == 1 else 0.0 for token in range(VOCABULARY)])
    logits_SBV = narrow.expand(4, 1, VOCABULARY).to(device())
    MTPLossLoggingHelper.tracker.clear()
    train_on_logits([logits_SBV], [1, 1, 1, 1], [1, 1, 1, 1], cross_entropy)
    tracker = MTPLossLoggingHelper.tracker
    return [tracker["correct_values"].item(), tracker["total_values"].item()]


@pytest.mark.parametrize("name", OVERWRITING)
def test_acceptance_is_right_when_the_cross_entropy_overwrites_its_logits(world, name):
    require_acceptance_counts()
    assert counts_with(OVERWRITING[name]) == [3.0, 3.0]


def test_metrics_of_a_written_out_example(world):
    """Labels 1 2 3 0 1 2 at t = 0 … 5; depth k at t is scored against labels[t + k].

    Position 0's own label is no target, so it may not enter the accepted length; t = 4 and 5 have
    no target at depth 2 and 1. Left are t = 1, 2, 3: accepted lengths 3, 1 (depth 2 is right after
    a wrong draft: no use) and 2.
    """
    from megatron.core.transformer.mtp_objective.metrics import MetricSums, MTPMetrics

    predicted_DS = [[2, 3, 1, 1, 2, 0], [3, 0, 1, 0, 0, 0]]
    logits_DSBV = [
        F.one_hot(torch.tensor(row, device=device()), VOCABULARY).double().unsqueeze(1)
        for row in predicted_DS
    ]
    sums = MetricSums(2)
    labels, mask = [1, 2, 3, 0, 1, 2], [0, 1, 1, 1, 1, 1]
    train_on_logits(logits_DSBV, labels, mask, plain_cross_entropy, mtp_metric_sums=sums)
    metrics = MTPMetrics(sums.sums)
    assert metrics.supervised_tokens == [5, 4]
    assert metrics.acceptance == [4 / 5, 3 / 4]
    assert metrics.accepted_length_positions == 3
    assert metrics.accepted_length == (3 + 1 + 2) / 3
    right, wrong = -math.log(math.e / (math.e + 3)), -math.log(1 / (math.e + 3))
    assert metrics.losses == pytest.approx([(4 * right + wrong) / 5, (3 * right + wrong) / 4])


def test_a_loss_is_weighted_by_tokens_and_not_by_microbatches(world):
    """One target with loss log 4 and three that are nearly certain: the mean is a quarter."""
    from megatron.core.transformer.mtp_objective.metrics import MetricSums, MTPMetrics

    sums = MetricSums(1)
    flat = torch.zeros(4, 1, VOCABULARY, dtype=torch.float64, device=device())
    certain = flat.clone()
    certain[..., 1] = 100.0
    for logits, mask in ((flat, [0, 1, 0, 0]), (certain, [0, 1, 1, 1])):
        train_on_logits(
            [logits], [1, 1, 1, 1], mask, plain_cross_entropy, mtp_metric_sums=sums
        )
    assert MTPMetrics(sums.sums).losses == pytest.approx([math.log(4) / 4])


def test_the_release_below_the_series_counts_wrongly_in_the_same_cases(tmp_path):
    """What the first test would find there."""
    try:
        tree = faulty_tree(tmp_path / "unpatched")
    except NoUnpatchedTree as reason:
        pytest.skip(str(reason))
    run_in_tree(tree, Path(__file__), [tmp_path / "counts.json"])
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert counts == {name: [0.0, 3.0] for name in OVERWRITING}


if __name__ == "__main__":
    with parallel_world():
        found = {name: counts_with(function) for name, function in OVERWRITING.items()}
    Path(sys.argv[1]).write_text(json.dumps(found))
