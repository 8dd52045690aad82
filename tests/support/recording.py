"""What a tree of Megatron computes with default flags: run as a script, once per tree.

    python recording.py OUTPUT

saves ``{"core": path of megatron.core, "values": {name: tensor}}``: outputs, gradients and logged
metrics of every case. Uses nothing that the series adds to Megatron.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, Iterator

import torch

from tests.support.batches import Batch, bshd_batch, thd_batch
from tests.support.device import device, prepare
from tests.support.models import ModelSpec, build_model
from tests.support.parallel import parallel_world
from tests.support.release import release

LABELS = ("labels-and-mask", "labels-only", "no-labels")
LAYOUTS = ("bshd", "thd")
_METRICS = ("loss_values", "correct_values", "total_values", "values")


def model_specs() -> Iterator[tuple[str, ModelSpec]]:
    """The models to record, with their names."""
    # Older releases detach no heads by themselves.
    detached = (False, True) if release() >= (0, 19) else (False,)
    for family, dtype, per_token, repeated, detach in itertools.product(
        ("gpt", "hybrid"), (torch.float32, torch.float64), *[(False, True)] * 2, detached
    ):
        spec = ModelSpec(
            family=family,
            repeated=repeated,
            per_token=per_token,
            dtype=dtype,
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            tied=repeated,
            overrides=dict(mtp_detach_heads=True) if detach else {},
        )
        words = (
            family,
            str(dtype).split(".")[1],
            "per-token" if per_token else "mean",
            "repeated-tied" if repeated else "distinct-untied",
            "detached" if detach else "attached",
        )
        yield "/".join(words), spec


def record() -> dict[str, torch.Tensor]:
    """Every value of every case, by name."""
    values: dict[str, torch.Tensor] = {}
    batches = {"bshd": bshd_batch(mask="prompt"), "thd": thd_batch((7, 5), None, mask="prompt")}
    with parallel_world():
        for name, spec in model_specs():
            model = build_model(spec)
            for mode, layout, labels in itertools.product(("train", "eval"), LAYOUTS, LABELS):
                model.train(mode == "train")
                case = f"{name}/{mode}/{layout}/{labels}"
                for what, value in _run(model, batches[layout], labels).items():
                    values[f"{case}: {what}"] = value
    return values


def _run(model, batch: Batch, labels: str) -> dict[str, torch.Tensor]:
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    kwargs: dict[str, Any] = batch.forward_kwargs()
    if labels == "labels-only":
        kwargs["loss_mask"] = None
    elif labels == "no-labels":
        kwargs["labels"] = None
    model.zero_grad(set_to_none=True)
    MTPLossLoggingHelper.tracker.clear()
    output = model(**kwargs)
    weights = torch.linspace(-1.0, 1.0, output.numel(), device=device()).view_as(output)
    (output * weights.to(output.dtype)).sum().backward()
    found = {"output": output.detach().cpu()}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad.cpu()
    for name in _METRICS:
        if name in MTPLossLoggingHelper.tracker:
            found[f"tracker {name}"] = MTPLossLoggingHelper.tracker[name].cpu()
    return found


if __name__ == "__main__":
    prepare()
    torch.use_deterministic_algorithms(True, warn_only=True)
    import megatron.core

    torch.save({"core": megatron.core.__file__, "values": record()}, sys.argv[1])
