"""The head that is trained: read from a checkpoint, wrapped for data-parallel gradients.

One rule scales all gradients, replicated and expert ones: 1 / (data-parallel size), summed over the
group that holds copies of the parameter. With the objective divided by n / (data-parallel size),
n targets over all ranks, that is the gradient of the mean over the n targets.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from examples.finetune_mtp_head.errors import FinetuneError
from examples.finetune_mtp_head.settings import Settings
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from tools.mtp_checkpoint.native.layer import NativeHead

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class UpdateResult:
    """One optimizer step: the gradient's norm before clipping and the learning rate used."""

    grad_norm: float
    lr: float


class TrainableHead:
    """A head in Megatron's DDP with AdamW, linear warm-up and cosine decay.

    Args:
        head: loaded, no parameter NaN.
        settings: of the run.
        groups: process groups.
        steps: of the whole run; the learning rate reaches its minimum with the last.
    """

    def __init__(
        self, head: NativeHead, settings: Settings, groups: ProcessGroupCollection, steps: int
    ) -> None:
        self.head = head
        self._ranks = groups.dp
        is_bf16 = settings.dtype == "bf16"
        self.ddp = DistributedDataParallel(
            head.config.transformer,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True),
            head,
            pg_collection=groups,
        )
        config = OptimizerConfig(
            optimizer="adam",
            decoupled_weight_decay=True,
            lr=settings.lr,
            min_lr=settings.min_lr,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.beta1,
            adam_beta2=settings.beta2,
            clip_grad=settings.clip_grad,
            bf16=is_bf16,
            params_dtype=TORCH_DTYPES[settings.dtype],
        )
        self.optimizer: MegatronOptimizer = get_megatron_optimizer(
            config, [self.ddp], use_gloo_process_groups=False, pg_collection=groups
        )
        self.schedule = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=settings.lr,
            min_lr=settings.min_lr,
            lr_warmup_steps=min(settings.warmup_steps, steps - 1),
            lr_decay_steps=steps,
            lr_decay_style="cosine",
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=steps,
            wd_incr_style="constant",
        )

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def reduce_gradients(self) -> None:
        """Sum and scale the gradients over the ranks; afterwards `main_grad` is the step's.

        Raises:
            FinetuneError: a gradient is not finite on some rank; raised on all of them.
        """
        self.ddp.finish_grad_sync()
        buffers = (*self.ddp.buffers, *self.ddp.expert_parallel_buffers)
        finite = torch.stack([buffer.grad_data.isfinite().all() for buffer in buffers]).all().int()
        torch.distributed.all_reduce(finite, op=torch.distributed.ReduceOp.MIN, group=self._ranks)
        if not finite:
            raise FinetuneError(
                "a gradient is not finite, so the step cannot be applied; lower --lr, or look for "
                "a damaged checkpoint with --preflight"
            )

    def update(self) -> UpdateResult:
        """Clip and apply the reduced gradients; the first step has a rate above 0 already."""
        self.schedule.step(increment=1)
        lr = max(group["lr"] for group in self.optimizer.param_groups)
        _, norm, _ = self.optimizer.step()
        # Heads whose configuration isolates them have a norm of their own.
        return UpdateResult(math.hypot(norm, *self.optimizer.grad_norms_by_group.values()), lr)

    def optimizer_state(self, is_loading: bool) -> dict[str, Any]:
        """The optimizer's sharded state; everything of `torch_dist` checkpoints but the head."""
        model = self.ddp.module.sharded_state_dict()
        return self.optimizer.sharded_state_dict(model, is_loading=is_loading)
