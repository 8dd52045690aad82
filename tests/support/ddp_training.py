"""Training steps as a trainer takes them: DDP, Megatron's schedules, optimizer and clipping.

The objective is a policy loss that the trainer computes from returned logits; the labels train the
MTP heads. Every rank makes the whole global batch and takes its own rows and context-parallel part,
so that any split sees the same tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Iterator, Sequence

import torch

from tests.support.batches import Batch, bshd_batch, cp_shard
from tests.support.device import device
from tests.support.models import ModelSpec, build_model, is_mtp_param


@dataclasses.dataclass(frozen=True)
class Training:
    """How to train.

    Attributes:
        distributed_optimizer: Shard optimizer states over data-parallel ranks.
        overlap_grad_reduce: Reduce each bucket while backward still runs.
        overlap_param_gather: Gather each bucket's updated parameters in the next forward.
        ddp: Further fields of DistributedDataParallelConfig.
        bucket_size: Elements per bucket; small, so that heads and policy have several.
        lr: Learning rate of Adam.
        clip_grad: Largest gradient norm; 0 does not clip.
        return_logits: Compute the policy loss from returned logits. False trains on the token
            losses that the model returns, which the unpatched release can do too.
        optimizer: False for models whose dtype no optimizer takes: gradients only.
        forward: Further arguments of the model's forward.
    """

    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = True
    overlap_param_gather: bool = False
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    bucket_size: int | None = 2000
    lr: float = 1e-2
    clip_grad: float = 0.0
    return_logits: bool = True
    optimizer: bool = True
    forward: dict[str, Any] = dataclasses.field(default_factory=dict)


class Trainer:
    """One model (this rank's pipeline stage) with its optimizer.

    Args:
        spec: The model.
        training: How to train it.
        groups: Process groups of the surrounding `parallel_world`.
    """

    def __init__(self, spec: ModelSpec, training: Training, groups: Any):
        from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
        from megatron.core.distributed import DistributedDataParallelConfig

        self.training, self.groups = training, groups
        model = build_model(spec, groups)
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=training.overlap_grad_reduce,
            overlap_param_gather=training.overlap_param_gather,
            use_distributed_optimizer=training.distributed_optimizer,
            bucket_size=training.bucket_size,
            **training.ddp,
        )
        self.model = DistributedDataParallel(model.config, ddp_config, model)
        self.optimizer = _optimizer(self.model, training) if training.optimizer else None
        config = model.config
        config.finalize_model_grads_func = finalize_model_grads
        if training.overlap_grad_reduce:
            config.no_sync_func = self.model.no_sync

    def backward(self, microbatches: Sequence[Batch], **forward: Any) -> None:
        """Gradients of one global batch into the DDP buffers, reduced and finalized.

        Args:
            microbatches: This rank's, whole rows cut to its context-parallel part.
            forward: Replaces or adds arguments of the model's forward, for this step.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        given = {**self.training.forward, **forward}
        if self.training.return_logits:
            given["return_logits"] = True
        length = microbatches[0].input_ids.size(1) * self.groups.cp.size()
        get_forward_backward_func()(
            forward_step_func=lambda batches, model: self._forward(next(batches), model, given),
            data_iterator=iter(microbatches),
            model=[self.model],
            num_microbatches=len(microbatches),
            seq_length=length,
            micro_batch_size=microbatches[0].input_ids.size(0),
            forward_only=False,
        )

    def step(self, microbatches: Sequence[Batch], **forward: Any) -> float:
        """One whole step; returns the gradient norm of the policy before clipping."""
        self.backward(microbatches, **forward)
        _, norm, _ = self.optimizer.step()
        return float(norm or 0.0)

    def _forward(self, batch: Batch, model: Any, forward: dict[str, Any]):
        output = model(**{**batch.forward_kwargs(), **forward})
        return output, lambda result: self._policy_loss(result, batch)

    def _policy_loss(self, result: torch.Tensor, batch: Batch):
        """Token cross-entropy times an advantage per token."""
        loss_BS = result
        if self.training.return_logits:
            loss_BS = torch.nn.functional.cross_entropy(
                result.transpose(1, 2), batch.labels, reduction="none"
            )
        advantages_BS = torch.sin(batch.labels.to(loss_BS.dtype))
        total = (loss_BS * advantages_BS * batch.loss_mask).sum()
        tokens = batch.loss_mask.sum()
        if self.model.config.calculate_per_token_loss:
            return total, tokens.int(), {}
        whole = tokens.clone()
        torch.distributed.all_reduce(whole, group=self.groups.cp)
        # The schedule multiplies by the context-parallel size, which DDP's mean divides out.
        return total / whole.clamp(min=1), {}

    def parameters(self) -> dict[str, torch.Tensor]:
        """A copy of every parameter of this stage, gathered from its owners first."""
        if self.training.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)
        named = self.model.module.named_parameters()
        return {name: parameter.detach().clone() for name, parameter in named}

    def gradients(self) -> dict[str, torch.Tensor]:
        """A copy of every ``main_grad`` of this stage."""
        named = self.model.module.named_parameters()
        return {name: parameter.main_grad.clone() for name, parameter in named}

    def optimizer_state(self, of_heads: bool) -> list[torch.Tensor]:
        """Adam's state of the heads or of everything else, and the parameters it is kept for."""
        tensors = []
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in optimizer.optimizer.param_groups:
                for parameter in group["params"]:
                    if (getattr(parameter, "grad_norm_group", None) == "mtp") == of_heads:
                        state = optimizer.optimizer.state[parameter]
                        tensors += [parameter, *(state[key] for key in ("exp_avg", "exp_avg_sq"))]
        return [tensor.detach().clone() for tensor in tensors]


def _optimizer(model: Any, training: Training):
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=training.lr,
        weight_decay=0.01,
        clip_grad=training.clip_grad,
        use_distributed_optimizer=training.distributed_optimizer,
        overlap_param_gather=training.overlap_param_gather,
    )
    return get_megatron_optimizer(config, [model], use_gloo_process_groups=False)


def global_batch(step: int, rows: int = 4, length: int = 16) -> Batch:
    """``rows`` rows of one step, with masks of very different length."""
    masks = [[int(t >= (3 * i + step) % (length - 2)) for t in range(length)] for i in range(rows)]
    batch = bshd_batch(rows, length, mask=masks)
    shift = torch.arange(rows, device=device())[:, None] * (step + 1) + 7 * step
    return dataclasses.replace(
        batch, input_ids=(batch.input_ids + shift) % 64, labels=(batch.labels + shift) % 64
    )


def rows_of(batch: Batch, rows: Any) -> Batch:
    """Some rows of a BSHD batch."""
    names = ("input_ids", "position_ids", "labels", "loss_mask")
    return dataclasses.replace(batch, **{name: getattr(batch, name)[rows] for name in names})


def microbatches(batch: Batch, groups: Any, number: int = 2) -> list[Batch]:
    """This rank's part of a global batch, in ``number`` microbatches."""
    per_rank = batch.input_ids.size(0) // groups.dp.size()
    first, size = groups.dp.rank() * per_rank, per_rank // number
    parts = [slice(first + i * size, first + (i + 1) * size) for i in range(number)]
    whole = [rows_of(batch, part) for part in parts]
    return [cp_shard(part, groups.cp.size(), groups.cp.rank()) for part in whole]


def is_policy(name: str) -> bool:
    """Whether a parameter is the policy's, which isolated heads must not change."""
    return not is_mtp_param(name)


@contextlib.contextmanager
def allocations_of(limit: int) -> Iterator[list[tuple[str, int]]]:
    """Record operations whose result owns new memory of at least ``limit`` elements.

    Yields:
        A list that fills with (operation, elements).
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    found: list[tuple[str, int]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            inputs = {
                t.untyped_storage().data_ptr()
                for t in torch.utils._pytree.tree_leaves((args, kwargs))
                if torch.is_tensor(t)
            }
            result = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(result):
                if torch.is_tensor(tensor) and tensor.numel() >= limit:
                    if tensor.untyped_storage().data_ptr() not in inputs:
                        found.append((str(func), tensor.numel()))
            return result

    with Watch():
        yield found
