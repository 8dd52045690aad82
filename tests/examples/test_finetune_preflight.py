"""Preflight of the fine-tuning example: it passes, and each check fails on its own fault.

    pytest tests/examples/test_finetune_preflight.py
"""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from tests.support import parallel_world, prepare, run_ranks

prepare()

from examples.finetune_mtp_head.loading import LoadedHead
from examples.finetune_mtp_head.preflight import Check, _import_gate, preflight
from examples.finetune_mtp_head.trainer import Trainer
from tests.examples.finetune_support import build, settings, tiny_model
from tools.mtp_checkpoint.importing import import_head
from tools.mtp_checkpoint.native.layer import build_mtp_block
from tools.mtp_checkpoint.source import HFDirectory

MODULES, GATE, SAMPLES = "native modules", "import gate", "each sample once per epoch"
INPUT, GRADIENTS = "the head's input is the final norm's output", "gradients finite and not zero"
UPDATE, AGREE, TARGET = "update applied", "ranks agree", "target untouched"
ORDER = [MODULES, GATE, SAMPLES, INPUT, GRADIENTS, UPDATE, AGREE, TARGET]


def layer(trainer: Trainer) -> torch.nn.Module:
    return trainer.head.head.mtp.layers[0]


def on_last_rank(trainer: Trainer) -> bool:
    return trainer.groups.dp.rank() == trainer.groups.dp.size() - 1


def foreign_module(trainer: Trainer) -> None:
    """The final norm is transformers' own, with the same weights: the same numbers come out."""
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeRMSNorm

    ours = layer(trainer).final_layernorm
    theirs = Qwen3_5MoeRMSNorm(ours.weight.numel(), eps=1e-6)
    theirs.weight = ours.weight
    layer(trainer).final_layernorm = theirs


@torch.no_grad()
def wrong_weight(trainer: Trainer) -> None:
    """One element of one expert, on the last rank, is off by its last bit."""
    if on_last_rank(trainer):
        experts = layer(trainer).mtp_model_layer.mlp.experts.local_experts
        weight = experts[1].linear_fc2.weight
        weight[0, 0] = torch.nextafter(weight[0, 0], torch.tensor(9.0))


@torch.no_grad()
def not_loaded(trainer: Trainer) -> None:
    """One parameter was not filled."""
    layer(trainer).eh_proj.weight.fill_(float("nan"))


def sample_twice(trainer: Trainer) -> None:
    """The sampler repeats its first step."""
    original = trainer.sampler.microbatches
    trainer.sampler.microbatches = lambda step: original(1 if step == 2 else step)


def pre_norm(trainer: Trainer) -> None:
    """The hook sits before the norm: the head is fed the states that enter it."""
    target = trainer.target
    target.norm.register_forward_hook(
        lambda _norm, args, _out: target._captured.__setitem__(-1, args[0])
    )


def changed_on_the_way(trainer: Trainer) -> None:
    """The captured states are right, but on the last rank others reach the head."""
    original = trainer.target.hidden
    if on_last_rank(trainer):
        trainer.target.hidden = lambda *args, **kwargs: original(*args, **kwargs) * (1 + 2**-23)


def no_gradient(trainer: Trainer) -> None:
    """Nothing flows back into one norm."""
    layer(trainer).hnorm.weight.register_hook(torch.zeros_like)


def infinite_gradient(trainer: Trainer) -> None:
    """A gradient overflows, in an expert of the last rank alone."""
    if on_last_rank(trainer):
        experts = layer(trainer).mtp_model_layer.mlp.experts.local_experts
        for expert in experts:
            expert.linear_fc1.weight.register_hook(lambda grad: grad * float("inf"))


def after_update(trainer: Trainer, change: Any) -> None:
    original = trainer.head.update

    def update():
        result = original()
        with torch.no_grad():
            change()
        return result

    trainer.head.update = update


def lost_update(trainer: Trainer) -> None:
    """One parameter gets its old value back."""
    weight = layer(trainer).eh_proj.weight
    old = weight.detach().clone()
    after_update(trainer, lambda: weight.copy_(old))


def ranks_apart(trainer: Trainer) -> None:
    """The last rank's router drifts by one bit."""
    weight = layer(trainer).mtp_model_layer.mlp.router.weight
    if on_last_rank(trainer):
        after_update(trainer, lambda: weight.view(-1)[0].mul_(1 + 2**-23))


def touched_target(trainer: Trainer) -> None:
    """The step writes to the frozen model."""
    weight = trainer.target.output_weight_VH
    after_update(trainer, lambda: weight.view(-1)[0].mul_(1 + 2**-23))


def trainable_target(trainer: Trainer) -> None:
    """The frozen model takes gradients."""
    trainer.target.output_weight_VH.requires_grad_(True)


FAULTS = {  # which checks each makes fail, all others passing or not being run
    foreign_module: [MODULES],
    wrong_weight: [GATE],
    not_loaded: [GATE],
    sample_twice: [SAMPLES],
    pre_norm: [INPUT],
    changed_on_the_way: [INPUT],
    no_gradient: [GRADIENTS],
    infinite_gradient: [GRADIENTS],
    lost_update: [UPDATE],
    ranks_apart: [AGREE],
    touched_target: [TARGET],
    trainable_target: [TARGET],
}


def checks_with(given, faults: list) -> dict[Any, list[Check]]:
    """On a rank: the check list with each fault, and with none."""
    found = {}
    with parallel_world(ep=given.expert_parallel_size) as groups:
        for fault in [None, *faults]:
            trainer, loaded = build(given, groups)
            if fault is not None:
                fault(trainer)
            found[fault.__name__ if fault else None] = preflight(trainer, loaded)
    return found


@functools.cache
def results() -> list[dict[Any, list[Check]]]:
    given = settings(expert_parallel_size=2)
    return run_ranks(checks_with, 2, given, list(FAULTS), timeout=180)


def test_a_sound_setup_passes_every_check_on_every_rank():
    for rank in results():
        assert [check.name for check in rank[None]] == ORDER
        assert [str(check) for check in rank[None] if not check.passed] == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_fails_its_check_and_no_other(fault):
    for rank in results():  # also where the fault is on one rank alone
        checks = rank[fault.__name__]
        assert [check.name for check in checks] == ORDER
        assert [c.name for c in checks if c.passed is False] == FAULTS[fault], checks


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (dict(family="qwen3_5"), dict()),
        (dict(layout="packed", dtype="bf16"), dict()),
        (dict(layout="packed", dtype="bf16"), dict(dtype="bf16")),
        (dict(), dict(dtype="bf16")),
    ],
    ids=["dense", "packed bf16 model, fp32 head", "both bf16", "fp32 model, bf16 head"],
)
def test_other_models_and_dtypes_pass_too(model, options):
    [rank] = run_ranks(checks_with, 1, settings(model=tiny_model(**model), **options), [])
    assert [str(check) for check in rank[None] if not check.passed] == []


def test_a_buffer_that_was_not_loaded_fails_the_import_gate_too():
    directory = HFDirectory.open(tiny_model(family="deepseek_v3"))  # its router has a bias
    with parallel_world() as groups:
        head = build_mtp_block(directory.config, groups=groups, device="cpu")
        import_head(directory, head, groups)
        loaded = LoadedHead(head, {}, {}, groups.ep, directory)
        assert _import_gate(loaded)[0]
        bias = head.mtp.layers[0].mtp_model_layer.mlp.router.expert_bias
        bias.fill_(float("nan"))
        passed, detail = _import_gate(loaded)
    assert not passed and "router.expert_bias" in detail


def test_after_a_failure_nothing_is_trained():
    [skipped] = {tuple(c.name for c in r["not_loaded"] if c.passed is None) for r in results()}
    assert skipped == (GRADIENTS, UPDATE, AGREE)


def test_a_rate_too_small_to_change_anything_fails_the_update_check():
    given = dataclasses.replace(settings(), lr=1e-30, min_lr=0.0)
    [rank] = run_ranks(checks_with, 1, given, [])
    assert [check.name for check in rank[None] if not check.passed] == [UPDATE]
    assert "did not move" in str(rank[None][5])
