"""One step with every check that a run relies on, before hours are spent on it.

Each check is made on all ranks together: it passes only if it passes on every one of them.
"""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.loading import LoadedHead
from examples.finetune_mtp_head.trainer import Trainer, mean_loss
from tests.support import device
from tools.mtp_checkpoint.importing import layer_tensors

_OWN_MODULES = ("megatron.", "torch.nn.modules.", "tools.mtp_checkpoint.native.")
_KIND = re.compile(r"linear_fc\d")  # what an expert's parameter is, however experts are stored


@dataclass(frozen=True)
class Check:
    """One line of the list. ``passed`` is None where an earlier failure left nothing to check."""

    name: str
    passed: bool | None
    detail: str

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAILED", None: "not run"}[self.passed]
        return f"[{mark:^7}] {self.name}: {self.detail}"


def preflight(trainer: Trainer, loaded: LoadedHead) -> list[Check]:
    """Run the checks; the trainer has made one step afterwards.

    Args:
        trainer: before its first step.
        loaded: the trainer's head as it was loaded.
    """
    head = loaded.head
    checks = [
        _check("native modules", *_native_modules(head)),
        _check("import gate", *_import_gate(loaded)),
        _check("each sample once per epoch", *_sampler(trainer)),
    ]
    before = trainer.target.checksum()
    checks.append(_check("the head's input is the final norm's output", *_head_input(trainer)))
    names = ("gradients finite and not zero", "update applied", "ranks agree")
    if all(check.passed for check in checks):
        checks.extend(_step_checks(trainer, names))
    else:
        checks.extend(Check(name, None, "an earlier check failed") for name in names)
    checks.append(_check("target untouched", *_target(trainer, before)))
    return checks


def _step_checks(trainer: Trainer, names: tuple[str, str, str]) -> Iterator[Check]:
    """The checks around one step."""
    parameters = dict(trainer.head.head.named_parameters())
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        loss = mean_loss(trainer.gradients(1))
    except FinetuneError as error:
        yield _check(names[0], False, str(error))
        yield from (Check(name, None, "an earlier check failed") for name in names[1:])
        return
    gradients = {name: parameter.main_grad.clone() for name, parameter in parameters.items()}
    yield _check(names[0], *_gradients(gradients))
    norm = trainer.head.update().grad_norm
    yield _check(names[1], *_update(start, parameters, gradients))
    yield _check(names[2], *_agreement(trainer, parameters, loss, norm))


def _native_modules(head: torch.nn.Module) -> tuple[bool, str]:
    """Every module of the head is Megatron's, torch's or the import tool's own."""
    found = {f"{type(m).__module__}.{type(m).__qualname__}" for m in head.modules()}
    foreign = sorted(name for name in found if not name.startswith(_OWN_MODULES))
    wanted = ["MultiTokenPredictionBlock", "TransformerLayer"]
    if head.config.transformer.num_moe_experts:
        grouped = head.implementation == "te"
        wanted.append("GroupedMLP" if grouped else "SequentialMLP")
    missing = [name for name in wanted if not any(f.endswith(name) for f in found)]
    if foreign or missing:
        return False, f"foreign {foreign}, missing {missing}"
    return True, f"{head.implementation}: {', '.join(wanted)}"


def _import_gate(loaded: LoadedHead) -> tuple[bool, str]:
    """Every parameter holds numbers, and every tensor of the source was used exactly once."""
    tensors = layer_tensors(loaded.head)  # a router's bias is no parameter, and imported too
    bad = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
    if bad:
        return False, f"{len(bad)} parameters are not finite, first {bad[0]}"
    if problem := loaded.problem():
        return False, problem
    return True, f"{len(tensors)} parameters on this rank, {loaded.description}"


def _sampler(trainer: Trainer) -> tuple[bool, str]:
    """Go through one epoch without the model, and count."""
    seen, sampler = trainer.seen, trainer.sampler
    for step in range(1, sampler.steps_per_epoch + 1):
        for part in sampler.microbatches(step):
            seen.add(part)
    try:
        seen.finish_epoch()
    except FinetuneError as error:
        return False, str(error)
    return True, f"{sampler.samples} samples in {sampler.steps_per_epoch} steps"


def _head_input(trainer: Trainer) -> tuple[bool, str]:
    """Both proofs of the captured states, at every position of the first step's microbatches."""
    problem, rows = "", 0
    with torch.no_grad():
        for batch in trainer.batches(1):
            try:
                hidden_BSH = trainer.target.hidden(batch.tokens_BS, prove_all=True)
                trainer.objective.head_hidden(trainer.head.ddp, batch, hidden_BSH)
            except FinetuneError as error:
                problem = problem or str(error)
            rows += batch.tokens_BS.numel()
    detail = f"bit for bit at {rows} positions, logits included"
    if trainer.depths > 1:
        feedback = trainer.objective.config.mtp_hidden_feedback
        detail += f"; {trainer.depths} depths, fed back {feedback}"
    return not problem, problem or detail


def _gradients(gradients: dict[str, Tensor]) -> tuple[bool, str]:
    """Replicated parameters each have a gradient; experts do that were chosen, on some rank."""
    empty = {name for name, gradient in gradients.items() if not gradient.any()}
    kinds = sorted({match[0] for n in gradients if _is_expert(n) and (match := _KIND.search(n))})
    live = [name for name in gradients if _is_expert(name) and name not in empty]
    reached = torch.tensor(
        [any(kind in name for name in live) for kind in kinds] or [True],
        dtype=torch.int32,
        device=device(),
    )
    dist.all_reduce(reached, op=dist.ReduceOp.MAX)
    replicated = sorted(name for name in empty if not _is_expert(name))
    if replicated:
        return False, f"no gradient reaches {len(replicated)} parameters, first {replicated[0]}"
    if not reached.all():
        return False, f"no gradient reaches any expert's {kinds}"
    experts = sum(_is_expert(name) for name in gradients)
    idle = sum(_is_expert(name) for name in empty)
    detail = f"{len(gradients) - experts} replicated"
    return True, detail + (f", {experts - idle} of {experts} of experts" if experts else "")


def _update(
    start: dict[str, Tensor], parameters: dict[str, Tensor], gradients: dict[str, Tensor]
) -> tuple[bool, str]:
    """What has a gradient has moved, and is a number."""
    moved = {name for name, p in parameters.items() if not torch.equal(p, start[name])}
    stuck = sorted(n for n, gradient in gradients.items() if gradient.any() and n not in moved)
    bad = sorted(name for name, p in parameters.items() if not p.isfinite().all())
    if stuck or bad:
        return False, f"{len(stuck)} parameters did not move {stuck[:1]}, {len(bad)} not finite"
    return True, f"{len(moved)} parameters moved"


def _agreement(
    trainer: Trainer, parameters: dict[str, Tensor], loss: float, norm: float
) -> tuple[bool, str]:
    """Loss, norm and all copies of a parameter are the same to the bit."""
    groups = trainer.groups
    shared = {n: p for n, p in parameters.items() if not _is_expert(n)}
    experts = {n: p for n, p in parameters.items() if _is_expert(n)}
    for what, value, group in (
        ("loss and gradient norm", (loss, norm), groups.dp),
        ("replicated parameters", _digest(shared), groups.dp),
        ("experts", _digest(experts), groups.expt_dp),
    ):
        found: list = [None] * group.size()
        dist.all_gather_object(found, value, group=group)
        if len(set(found)) > 1:
            return False, f"{what} differ: {found}"
    return True, f"loss {loss:.6f}, gradient norm {norm:.6f} on {groups.dp.size()} ranks"


def _target(trainer: Trainer, before: str) -> tuple[bool, str]:
    """The target is what it was, and has no gradients."""
    target = trainer.target
    named = target.model.named_parameters()
    touched = [name for name, p in named if p.requires_grad or p.grad is not None]
    if touched:
        return False, f"{len(touched)} of its parameters take gradients, first {touched[0]}"
    if (after := target.checksum()) != before:
        return False, f"its checksum was {before[:12]} and is {after[:12]}"
    return True, f"checksum {before[:12]}"


def _check(name: str, passed: bool, detail: str) -> Check:
    """The check over all ranks, with the detail of the first rank that fails."""
    found: list = [None] * dist.get_world_size()
    dist.all_gather_object(found, (passed, detail))
    for rank, (fine, text) in enumerate(found):
        if not fine:
            return Check(name, False, f"rank {rank}: {text}")
    return Check(name, True, found[0][1])


def _is_expert(name: str) -> bool:
    return ".experts." in name


def _digest(parameters: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, parameter in sorted(parameters.items()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
