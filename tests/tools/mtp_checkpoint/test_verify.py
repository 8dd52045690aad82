"""`verify` passes a right import and fails each of the mistakes that look right."""

import dataclasses
import functools
import json

import pytest
import torch

from tests.support import parallel_world, prepare
from tests.tools.mtp_checkpoint.mistakes import MISTAKES, PreNormHead
from tests.tools.mtp_checkpoint.native_support import Kind, directory, imported, reference
from tools.mtp_checkpoint.comparing import compare
from tools.mtp_checkpoint.verify_options import LIMITS
from tools.mtp_checkpoint.verify_report import report_on, show
from tools.mtp_checkpoint.verify_rows import random_rows, target_rows

prepare()

KIND = Kind("qwen3_5_moe", "per-expert", "fp32")
TOLERANCE, TIE_GAP = LIMITS["local"].hidden, LIMITS["local"].tie_gap


@functools.cache
def _target_rows(kind):
    return target_rows(directory(kind), None, 8, 64)


def _checks(report):
    return {check.name: check for check in report.checks}


@pytest.mark.parametrize(
    "kind",
    [KIND, Kind("qwen3_5_moe", "packed", "bf16"), Kind("qwen3_5", "dense", "bf16")],
    ids=str,
)
@pytest.mark.parametrize("rows_from", ["target", "random"])
def test_a_right_import_passes_every_check(kind, rows_from):
    rows = (
        _target_rows(kind) if rows_from == "target" else random_rows(directory(kind), 8, 64, 0)
    )
    with parallel_world() as groups:
        comparison = compare(imported(kind, groups), reference(kind), rows)
    report = report_on(rows, comparison)
    assert report.passed, [check for check in report.checks if not check.passed]
    assert report.rows == 8 * 62
    assert comparison.hidden_delta <= 5e-6
    assert comparison.argmax_agreement == 1.0
    assert comparison.ce_difference("reference") <= 5e-8
    assert comparison.ce_difference("recomputed") <= 2e-8
    assert (comparison.pre_norm_ce is None) == (rows_from == "random")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_silent_mistake_shows_in_the_hidden_states(mistake):
    rows = _target_rows(KIND)
    with parallel_world() as groups:
        head = imported(KIND, groups)
        MISTAKES[mistake](head)
        comparison = compare(head, reference(KIND), rows)
    _assert_failed_by_the_hidden_states(rows, comparison)


def test_hidden_states_before_the_final_norm_show_in_the_hidden_states():
    rows = _target_rows(KIND)
    with parallel_world() as groups:
        wrong = PreNormHead(imported(KIND, groups), rows)
        comparison = compare(wrong, reference(KIND), rows)
    _assert_failed_by_the_hidden_states(rows, comparison)


def _assert_failed_by_the_hidden_states(rows, comparison):
    report = report_on(rows, comparison)
    assert not report.passed
    assert not _checks(report)["hidden state, max |Δ|, routers agreeing"].passed
    # Far beyond rounding, in most rows, and the cross entropy alone would hardly tell.
    assert comparison.hidden_delta > 1000 * TOLERANCE
    assert (comparison.delta_N > TOLERANCE).double().mean() > 0.5
    assert comparison.ce_difference("reference") < 0.1


def test_a_router_flip_at_a_tie_counts_apart_and_one_beyond_it_fails(capsys):
    kind = Kind("qwen3_5_moe", "packed", "fp32")
    rows = random_rows(directory(kind), 4, 64, 0)
    with parallel_world() as groups:
        head = imported(kind, groups)
        router = head.mtp.layers[0].mtp_model_layer.mlp.router
        comparison = compare(head, reference(kind), rows)
        assert not comparison.flipped_N.any()
        # Logits move by a few times the smallest gap: some rows choose other experts, most do not.
        push = comparison.gap_N.min().item()
        router.weight.data += 3 * push * torch.randn(
            router.weight.shape, generator=torch.Generator().manual_seed(0)
        )
        flipped = compare(head, reference(kind), rows)
    assert 0 < flipped.flipped_N.sum() < len(flipped.flipped_N)
    at_ties = dataclasses.replace(flipped, gap_N=torch.full_like(flipped.gap_N, TIE_GAP / 2))
    flips = f"router flips with a top-k gap above {TIE_GAP:g}"
    assert _checks(report_on(rows, at_ties))[flips].passed
    beyond = dataclasses.replace(flipped, gap_N=torch.full_like(flipped.gap_N, TIE_GAP * 2))
    assert not _checks(report_on(rows, beyond))[flips].passed
    # The least tied is named first, by sequence and position.
    row = int((flipped.gap_N * flipped.flipped_N).argmax())
    show(report_on(rows, flipped))
    first = next(x for x in capsys.readouterr().out.splitlines() if x.startswith("other experts"))
    assert f"in sequence {row // 62}, position {row % 62}: top-k gap" in first
    # Rows that changed an expert do not count in the hidden states' figure.
    assert at_ties.delta_N[at_ties.flipped_N].max() > 10 * at_ties.hidden_delta


def test_not_a_number_anywhere_fails_and_the_report_stays_json():
    rows = random_rows(directory(KIND), 2, 16, 0)
    with parallel_world() as groups:
        head = imported(KIND, groups)
        head.mtp.layers[0].enorm.weight.data[3] = float("nan")
        report = report_on(rows, compare(head, reference(KIND), rows))
    assert not report.passed
    assert not _checks(report)["hidden state, max |Δ|, routers agreeing"].passed
    json.loads(json.dumps(report.as_json(), allow_nan=False))
