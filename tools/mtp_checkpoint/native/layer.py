"""The head: upstream's MultiTokenPredictionBlock, alone, beside a frozen target.

B: batch, S: sequence, H: hidden size, R: rotated dimensions of a head.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from tools.mtp_checkpoint.native.config import head_config
from tools.mtp_checkpoint.native.spec import block_spec
from tools.mtp_checkpoint.served import Served
from tools.mtp_checkpoint.source import text_config_of

Embed = Callable[[Tensor], Tensor]


class NativeHead(torch.nn.Module):
    """One MTP layer and nothing else: embedding and output layer are the target's.

    Attributes:
        mtp: Upstream's block with one layer; its dist-checkpoint keys are those it has in a
            GPTModel, ``mtp.layers.0.…``.
        config: The `HeadConfig` it was built from.
        text_config: The language model's part of the Hugging Face configuration.
        implementation: "local" or "te".
        served: How often the layer is run, and on what.
    """

    def __init__(
        self,
        hf_config: dict[str, Any],
        groups: ProcessGroupCollection,
        *,
        dtype: torch.dtype,
        device: torch.device,
        implementation: str = "local",
        served: Served = Served(),
    ):
        super().__init__()
        self.text_config = text_config_of(hf_config)
        self.implementation, self.served = implementation, served
        self.config = head_config(
            hf_config,
            dtype=dtype,
            expert_parallel_size=groups.ep.size(),
            implementation=implementation,
            cpu=device.type == "cpu",
            served=served,
        )
        spec = block_spec(self.config, implementation)
        self.mtp = MultiTokenPredictionBlock(
            self.config.transformer, spec, pg_collection=groups
        ).to(device)
        # torch's own norms ignore params_dtype. Buffers keep theirs: a router's bias is float32.
        for parameter in self.mtp.parameters():
            parameter.data = parameter.data.to(dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return self.config.transformer.params_dtype

    def forward(
        self, token_ids_BS: Tensor, position_ids_BS: Tensor, hidden_SBH: Tensor, embed: Embed
    ) -> Tensor:
        """The head's hidden states, from which the target's output layer predicts token t + 2.

        Position t combines the target's hidden state at t with the embedding of token t + 1. The
        last position has no next token: upstream takes token id 0 for it. Mask the last two
        targets of a row. With K depths, depth k combines depth k - 1's hidden state with the
        embedding of token t + k, and predicts token t + k + 1.

        Gradients stop at the inputs: the target stays untouched, and so do the tensors passed,
        whatever their dtype.

        Args:
            token_ids_BS: int64.
            position_ids_BS: int64, positions of a text. The three-row positions of multimodal
                input are refused.
            hidden_SBH: The target's hidden states after its final norm, any floating dtype.
            embed: Token ids [B, S] to embeddings [B, S, H], the target's.

        Returns:
            [K·S, B, H] after the head's final norm, depth by depth, in `dtype`.

        Raises:
            ValueError: Shapes that do not fit, or multimodal positions.
        """
        _check_inputs(token_ids_BS, position_ids_BS, hidden_SBH, self.config.transformer)

        def embedding(input_ids: Tensor, position_ids: Tensor) -> Tensor:
            return self._private_copy(embed(input_ids).transpose(0, 1))

        hidden_2SBH = self.mtp(
            input_ids=token_ids_BS,
            position_ids=position_ids_BS,
            hidden_states=self._private_copy(hidden_SBH),
            attention_mask=None,
            rotary_pos_emb=self._rotary_angles(position_ids_BS),
            embedding=embedding,
        )
        # The block returns its input in front of what its depths computed.
        return hidden_2SBH[hidden_SBH.shape[0] :]

    def _private_copy(self, x: Tensor) -> Tensor:
        """A contiguous copy outside any graph: upstream sets requires_grad on what it is given."""
        with torch.no_grad():
            return x.detach().to(self.dtype).clone(memory_format=torch.contiguous_format)

    def _rotary_angles(self, position_ids_BS: Tensor) -> Tensor | None:
        """Angles [S, B, 1, R] in float32: position · theta^(-2i/R), twice in a row.

        None for multi-latent attention, which counts positions itself.
        """
        dim = self.config.rotary_dim
        if dim == 0:
            if (position_ids_BS.diff(dim=1) != 1).any():
                raise ValueError(
                    "position_ids: multi-latent attention takes rows of consecutive positions only"
                )
            return None
        exponents = torch.arange(0, dim, 2, dtype=torch.float32, device=position_ids_BS.device)
        frequencies = 1.0 / (self.config.rotary_theta ** (exponents / dim))
        angles_SBR = position_ids_BS.t()[..., None].float() * frequencies
        return torch.cat((angles_SBR, angles_SBR), dim=-1)[:, :, None]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None
    ) -> dict[str, Any]:
        """The head's sharded tensors under the keys they have in a GPTModel."""
        return self.mtp.sharded_state_dict(f"{prefix}mtp.", sharded_offsets, metadata)


def build_mtp_block(
    hf_config: dict[str, Any],
    *,
    groups: ProcessGroupCollection | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
    implementation: str = "local",
    served: Served = Served(),
) -> NativeHead:
    """Build the head of a Hugging Face checkpoint, every parameter NaN until one is loaded.

    Call it after Megatron's groups exist.

    Args:
        hf_config: Contents of config.json, or its ``text_config``.
        groups: Process groups; None takes Megatron's global ones. Tensor, pipeline and context
            parallel sizes must be 1; routed experts are spread over ``ep``.
        dtype: Of parameters and activations.
        device: None takes the current CUDA device, or the CPU without one.
        implementation: "local" (any device), or "te": Transformer Engine with grouped GEMM.
        served: How often the layer is run, and on what: one depth.

    Raises:
        tools.mtp_checkpoint.errors.CheckpointError: A configuration that the layer cannot express,
            or "te" where it is not installed.
        ValueError: Groups of another parallelism.
    """
    if groups is None:
        groups = ProcessGroupCollection.use_mpu_process_groups()
    sizes = {name: getattr(groups, name).size() for name in ("tp", "pp", "cp")}
    if any(size != 1 for size in sizes.values()):
        raise ValueError(
            f"groups: expected tp, pp and cp of size 1, got {sizes}; spread the head with ep"
        )
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    head = NativeHead(
        hf_config,
        groups,
        dtype=dtype,
        device=torch.device(device),
        implementation=implementation,
        served=served,
    )
    fill_nan(head)
    return head


def fill_nan(module: torch.nn.Module) -> None:
    """Set all that a checkpoint holds of the module, parameters and persistent buffers, to NaN.

    What nothing was loaded into then cannot pass unnoticed.
    """
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if torch.is_tensor(tensor) and tensor.is_floating_point():
                tensor.fill_(float("nan"))


def _check_inputs(
    token_ids_BS: Tensor, position_ids_BS: Tensor, hidden_SBH: Tensor, config: Any
) -> None:
    if position_ids_BS.ndim != 2:
        raise ValueError(
            f"position_ids: expected [b, s], got {list(position_ids_BS.shape)}. Three-row (mrope) "
            "positions of images and videos are not supported: this layer's rotary embedding and "
            "the checkpoint's interleaved one agree on text only. Pass text."
        )
    batch, length = token_ids_BS.shape
    expected = (length, batch, config.hidden_size)
    if tuple(position_ids_BS.shape) != (batch, length) or tuple(hidden_SBH.shape) != expected:
        raise ValueError(
            f"for token_ids {[batch, length]}: expected position_ids of the same shape and hidden "
            f"{list(expected)} ([s, b, h]), got {list(position_ids_BS.shape)} and "
            f"{list(hidden_SBH.shape)}"
        )
