"""What a run does: one frozen object, and the refusal of what cannot work."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.finetune_mtp_head.errors import FinetuneError
from tools.mtp_checkpoint.engines import ENGINES

IMPLEMENTATIONS = ("local", "te")
DTYPES = ("fp32", "bf16")
LONG_SAMPLES = ("error", "truncate", "drop")
# What may differ between a run and its continuation: none of it changes a step.
_FREE_ON_RESUME = ("output", "eval_every", "checkpoint_every", "keep_checkpoints")


@dataclass(frozen=True)
class Settings:
    """All choices of a run.

    Attributes:
        model: Hugging Face directory of the frozen target.
        output: folder of metrics, plot and checkpoints.
        head: checkpoint made by ``tools.mtp_checkpoint import``, or one of an earlier run; None
            imports the head of ``model``.
        data: folder of JSONL conversations; None uses the bundled set.
        held_out_data: the same for evaluation; None holds out samples of ``data``.
        held_out: how many samples are held out, or kept of ``held_out_data``.
        max_samples: training samples to keep, chosen by the seed; None keeps all.
        max_length: longest sample in tokens.
        long_samples: what happens to longer ones, one of ``LONG_SAMPLES``.
        split_turns: make one sample per assistant turn, its last, instead of one per conversation.
        expert_parallel_size: ranks that share the routed experts.
        same_batch_per_ep_group: give those ranks the same samples instead of different ones.
        implementation: modules of the layer: "local" or "te" (Transformer Engine).
        depths: draft steps that the engine makes with the one layer; None takes what ``head``
            was imported with, or 1.
        engine: "vllm" or "sglang", whose way of feeding hidden states back is trained; None takes
            what ``head`` was imported with, or "vllm".
        dtype: of the head's parameters, "fp32" or "bf16" (with fp32 master weights).
        epochs: passes over the training samples.
        batch_size: samples per optimizer step, over all ranks.
        micro_batch_size: samples per forward on one rank.
        lr, min_lr: peak and final learning rate.
        warmup_steps: steps over which the learning rate rises.
        weight_decay: of all matrices; norms, which are vectors, do not decay.
        beta1, beta2: of AdamW.
        clip_grad: largest gradient norm; inf does not clip.
        eval_every: steps between evaluations; there is one before the first step and at the end.
        checkpoint_every: steps between checkpoints; there is one at the end.
        keep_checkpoints: newest checkpoints to keep; 0 keeps all.
        seed: of the order of the samples and of Megatron's generators.
    """

    model: Path
    output: Path
    head: Path | None = None
    data: Path | None = None
    held_out_data: Path | None = None
    held_out: int = 64
    max_samples: int | None = None
    max_length: int = 2048
    long_samples: str = "error"
    split_turns: bool = False
    expert_parallel_size: int = 1
    same_batch_per_ep_group: bool = False
    implementation: str = "local"
    depths: int | None = None
    engine: str | None = None
    dtype: str = "fp32"
    epochs: int = 1
    batch_size: int = 16
    micro_batch_size: int = 4
    lr: float = 1e-4
    min_lr: float = 1e-5
    warmup_steps: int = 10
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    clip_grad: float = 1.0
    eval_every: int = 20
    checkpoint_every: int = 100
    keep_checkpoints: int = 2
    seed: int = 1

    def __post_init__(self) -> None:
        """Refuse what no run can use.

        Raises:
            FinetuneError: names the setting, what it must be and what it is.
        """
        least = dict.fromkeys(
            ("held_out", "expert_parallel_size", "epochs", "batch_size", "micro_batch_size"), 1
        )
        least |= dict.fromkeys(("eval_every", "checkpoint_every"), 1)
        least |= dict.fromkeys(("warmup_steps", "keep_checkpoints", "seed"), 0)
        # A position, its next token, and the one behind that for each depth.
        least |= {"max_length": 2 + (self.depths or 1)}
        if self.depths is not None:
            least["depths"] = 1
        if self.max_samples is not None:
            least["max_samples"] = 1
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise FinetuneError(f"{name} must be at least {minimum}, got {getattr(self, name)}")
        for name, known in (
            ("implementation", IMPLEMENTATIONS),
            ("dtype", DTYPES),
            ("long_samples", LONG_SAMPLES),
            ("engine", (None, *ENGINES)),
        ):
            if getattr(self, name) not in known:
                raise FinetuneError(
                    f"{name} must be one of {', '.join(filter(None, known))}, got "
                    f"{getattr(self, name)!r}"
                )
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        if not (0 < self.lr < math.inf and 0 <= self.min_lr <= self.lr):
            raise FinetuneError(
                f"expected 0 < lr and 0 ≤ min_lr ≤ lr, got lr {self.lr} and min_lr {self.min_lr}"
            )
        if not self.clip_grad > 0:
            raise FinetuneError(
                f"clip_grad must be greater than 0, got {self.clip_grad}; inf does not clip"
            )
        if not 0 <= self.weight_decay < math.inf:
            raise FinetuneError(f"weight_decay must not be negative, got {self.weight_decay}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise FinetuneError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    @property
    def bundled(self) -> Path:
        """Where the bundled conversations are written if no others are given."""
        return self.output / "data"

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        values = dataclasses.asdict(self)
        return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}

    def check_continues(self, earlier: dict[str, Any]) -> None:
        """Refuse to continue a run whose steps would not be these.

        Args:
            earlier: ``as_dict`` of the run that wrote the checkpoint.

        Raises:
            FinetuneError: lists every setting that differs.
        """
        differing = [
            f"{name} was {earlier.get(name)!r} and is {value!r}"
            for name, value in self.as_dict().items()
            if name not in _FREE_ON_RESUME and earlier.get(name, _DEFAULTS.get(name)) != value
        ]
        if differing:
            raise FinetuneError(
                f"--resume needs the settings of the run it continues: {'; '.join(differing)}"
            )


# What a run of an earlier version, which did not know a setting, had in its place.
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Settings)}
