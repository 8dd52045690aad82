"""The head as transformers' own layers compute it: what `verify` compares with.

Shares no code with the import. It reads the checkpoint's tensors under their own names, and its
modules carry those names, so that nothing but stacking experts lies between file and module.

B: batch, S: sequence, H: hidden size, E: experts.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from typing import Any

import torch
from torch import Tensor

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.reference_families import REFERENCES, ReferenceFamily
from tools.mtp_checkpoint.target_matrices import target_matrices


@dataclasses.dataclass(frozen=True)
class Routing:
    """What the reference's router did.

    Attributes:
        chosen_BSE: Whether a row goes to an expert.
        gap_BS: Between the last logit chosen and the first one not: how close the choice was.
            inf where the choice is not one of largest logits (groups, biases).
    """

    chosen_BSE: Tensor
    gap_BS: Tensor


class ReferenceHead(torch.nn.Module):
    """One decoder layer of transformers between the head's own norms and projection.

    Attributes:
        embedding_VH: The target's embedding.
        output_VH: The target's output layer.
        config: transformers' configuration of the layer.
    """

    def __init__(self, family: ReferenceFamily, text_config: dict[str, Any]):
        super().__init__()
        modeling = importlib.import_module(f"transformers.models.{family.module}")
        make_config = getattr(importlib.import_module("transformers"), family.config)
        self.config = make_config(**_layer_config(text_config))
        # The plainest implementations: an explicit mask, experts one by one.
        self.config._attn_implementation = "eager"
        self.config._experts_implementation = "eager"
        self.hidden_first = family.hidden_first
        self.fed_back_before_norm = family.fed_back_before_norm
        norm = getattr(modeling, f"{family.stem}RMSNorm")
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.fc = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.pre_fc_norm_embedding = norm(hidden, eps=eps)
        self.pre_fc_norm_hidden = norm(hidden, eps=eps)
        layer = getattr(modeling, f"{family.stem}DecoderLayer")
        self.layers = torch.nn.ModuleList([layer(self.config, 0)])
        self.norm = norm(hidden, eps=eps)
        self.rotary = getattr(modeling, family.rotary)(self.config)
        self.embedding_VH = self.output_VH = None

    @classmethod
    def from_directory(
        cls,
        directory: Any,
        dtype: torch.dtype = torch.float32,
        rounded_to: torch.dtype | None = None,
    ) -> "ReferenceHead":
        """Load the head of a Hugging Face directory.

        Args:
            directory: A ``tools.mtp_checkpoint.source.HFDirectory``.
            dtype: Of parameters and computation.
            rounded_to: Round every parameter to this dtype first, for a comparison with a head
                that was stored in it. A router's bias is not a parameter, and stays float32.

        Raises:
            CheckpointError: No reference for the model type, or tensors of the head that are
                missing, left over or of another shape.
        """
        text_config = directory.text_config
        family = REFERENCES.get(text_config.get("model_type"))
        if family is None:
            raise CheckpointError(
                f"no reference for model_type {text_config.get('model_type')!r}; there is one for "
                f"{', '.join(sorted(REFERENCES))}"
            )
        head = cls(family, text_config).to(dtype)
        tensors = {}
        for key in directory.tensors:
            name = _renamed(key, family, text_config["num_hidden_layers"])
            if name is not None:
                tensors[name] = directory.read(key).to(dtype)
        head._load(_stacked(tensors))
        if rounded_to is not None:
            for parameter in head.parameters():
                parameter.data = parameter.data.to(rounded_to).to(dtype)
        head.embedding_VH, head.output_VH = target_matrices(directory, dtype)
        return head.eval().requires_grad_(False)

    def _load(self, tensors: dict[str, Tensor]) -> None:
        try:
            self.load_state_dict(tensors, strict=True)
        except RuntimeError as error:
            raise CheckpointError(f"the reference cannot hold this head: {error}") from error

    def embed(self, token_ids_BS: Tensor) -> Tensor:
        """The target's embeddings [B, S, H]."""
        return torch.nn.functional.embedding(token_ids_BS, self.embedding_VH)

    def forward(
        self, token_ids_BS: Tensor, position_ids_BS: Tensor, hidden_BSH: Tensor
    ) -> tuple[Tensor, Routing | None]:
        """The head's hidden states after its final norm, and its router's choice.

        Position t combines ``hidden_BSH[:, t]`` with the embedding of token t + 1, and of token
        0 behind the last one.

        Returns:
            [B, S, H], and the routing or None for a dense head.
        """
        x_BSH = self.joined(token_ids_BS, hidden_BSH, 1)
        length = token_ids_BS.shape[1]
        may_attend_SS = torch.ones(length, length, dtype=torch.bool).tril()
        x_BSH, routing = self.run_layer(x_BSH, position_ids_BS, may_attend_SS)
        return self.norm(x_BSH), routing

    def joined(self, token_ids_BS: Tensor, hidden_BSH: Tensor, ahead: int) -> Tensor:
        """The layer's input [B, S, H]: hidden states beside the embeddings of tokens ``ahead``."""
        hidden_BSH = hidden_BSH.to(self.fc.weight.dtype)
        ids_BS = torch.nn.functional.pad(token_ids_BS[:, ahead:], (0, ahead))
        both = [
            self.pre_fc_norm_embedding(self.embed(ids_BS)),
            self.pre_fc_norm_hidden(hidden_BSH),
        ]
        return self.fc(torch.cat(both[::-1] if self.hidden_first else both, dim=-1))

    def run_layer(
        self, x_BLH: Tensor, position_ids_BL: Tensor, may_attend_LL: Tensor
    ) -> tuple[Tensor, Routing | None]:
        """The layer's output before its closing norm, [B, L, H], and its router's choice.

        Args:
            x_BLH: Its input, L rows of each sequence.
            position_ids_BL: Of the rows.
            may_attend_LL: bool, whether the row of the first index sees that of the second.
        """
        batch, length = position_ids_BL.shape
        mask_11LL = torch.zeros(1, 1, length, length, dtype=x_BLH.dtype)
        mask_11LL.masked_fill_(~may_attend_LL, float("-inf"))
        routed = []
        hook = self._hook_router(routed)
        try:
            x_BLH = self.layers[0](
                x_BLH,
                position_embeddings=self.rotary(x_BLH, position_ids_BL),
                attention_mask=mask_11LL,
                position_ids=position_ids_BL,
            )
        finally:
            hook()
        return x_BLH, _routing(*routed[0], (batch, length)) if routed else None

    def _hook_router(self, routed: list[tuple[Tensor, Tensor]]) -> Any:
        """Append the router's logits and indices to the list; returns what ends that."""
        gate = getattr(self.layers[0].mlp, "gate", None)
        if gate is None:
            return lambda: None
        hook = gate.register_forward_hook(lambda _m, _in, out: routed.append((out[0], out[2])))
        return hook.remove


def _routing(logits: Tensor, indices: Tensor, shape: tuple[int, int]) -> Routing:
    """From a router's logits [B·S, E] and the indices [B·S, k] it chose."""
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, indices, True)
    infinite = torch.full_like(logits, float("inf"))
    gap = torch.where(chosen, logits, infinite).amin(-1) + torch.where(
        chosen, infinite, -logits
    ).amin(-1)
    gap = torch.where(gap < 0, infinite[:, 0], gap)
    return Routing(chosen.unflatten(0, shape), gap.unflatten(0, shape))


def _layer_config(text_config: dict[str, Any]) -> dict[str, Any]:
    """The head's one layer: full attention, whatever layers the target has."""
    kept = {key: value for key, value in text_config.items() if key != "model_type"}
    wanted = {"layer_types": ["full_attention"], "first_k_dense_replace": 0}
    kept |= {key: value for key, value in wanted.items() if key in kept}
    return kept | {"num_hidden_layers": 1}


def _renamed(key: str, family: ReferenceFamily, layers: int) -> str | None:
    if re.fullmatch(family.ignored.replace("LAST", str(layers)), key):
        return None
    for pattern, replacement in family.renames:
        if match := re.fullmatch(pattern.replace("LAST", str(layers)), key):
            return match.expand(replacement)
    return None


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts stored one by one, as the packed tensors that transformers' modules hold."""
    pattern = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
    experts: dict[str, dict[tuple[int, str], Tensor]] = {}
    whole = {}
    for name, tensor in tensors.items():
        if match := pattern.fullmatch(name):
            experts.setdefault(match[1], {})[int(match[2]), match[3]] = tensor
        else:
            whole[name] = tensor
    for prefix, parts in experts.items():
        count = 1 + max(expert for expert, _ in parts)
        try:
            gate_up = [torch.cat([parts[e, "gate"], parts[e, "up"]]) for e in range(count)]
            whole[f"{prefix}.gate_up_proj"] = torch.stack(gate_up)
            whole[f"{prefix}.down_proj"] = torch.stack([parts[e, "down"] for e in range(count)])
        except (KeyError, RuntimeError) as error:  # one is missing, or of another shape
            raise CheckpointError(
                f"{prefix}: expected gate, up and down of {count} equal experts: {error}"
            ) from error
    return whole
