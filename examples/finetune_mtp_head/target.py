"""The frozen model: its post-final-norm hidden states, captured where they are made.

Shape suffixes: B samples, S positions, H hidden size, K chosen positions, N rows, V vocabulary.
"""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.finetune_mtp_head.errors import FinetuneError

_PROVEN_POSITIONS = 16  # per microbatch; preflight proves all of them


class FrozenTarget:
    """A causal language model of transformers that is only read.

    Args:
        model: with a decoder that ends in ``norm``, and an output layer without bias.

    Raises:
        FinetuneError: the model has no such parts.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval().requires_grad_(False)
        self.norm = getattr(model.get_decoder(), "norm", None)
        output, self._embedding = model.get_output_embeddings(), model.get_input_embeddings()
        if self.norm is None or output is None or getattr(output, "bias", None) is not None:
            raise FinetuneError(
                f"{type(model).__name__} must be a causal language model whose decoder ends in "
                "`norm`, with an output layer without bias"
            )
        self.output_weight_VH: Tensor = output.weight
        self._output = output
        self._captured: list[Tensor] = []  # what the norm put out, of the latest forward
        self.norm.register_forward_hook(lambda _norm, _args, out: self._captured.append(out))

    @classmethod
    def load(cls, directory: Path, device: torch.device) -> "FrozenTarget":
        """Load with the checkpoint's own dtype. Only safetensors are read.

        Raises:
            FinetuneError: transformers cannot load the directory.
        """
        from transformers import AutoModelForCausalLM

        try:
            model, found = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype="auto",
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise FinetuneError(f"transformers cannot load {directory}: {error}") from error
        if missing := sorted(found["missing_keys"]):
            raise FinetuneError(
                f"{directory} lacks {len(missing)} tensors of its own model, first {missing[0]}; "
                "a target must be complete"
            )
        return cls(model.to(device))

    @property
    def config(self) -> Any:
        """The text model's configuration."""
        return self.model.config.get_text_config()

    @property
    def norm_output_BSH(self) -> Tensor:
        """What the final norm put out in the latest forward, as it was captured."""
        return self._captured[-1]

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding."""
        return self._embedding.weight.size(0)

    @torch.no_grad()
    def embed(self, input_ids_BS: Tensor) -> Tensor:
        """The model's embeddings of int64 [b, s], [b, s, h]."""
        return self._embedding(input_ids_BS)

    @torch.no_grad()
    def hidden(self, tokens_BS: Tensor, prove_all: bool = False) -> Tensor:
        """Run the model; return what its final norm put out, [b, s, h] in the model's dtype.

        The proof that these are the states behind the model's own logits is part of the call: the
        norm ran once, and the output layer applied to its output gives the logits bit for bit, at
        positions spread over the row.

        Args:
            tokens_BS: int64; padding is on the right, where a causal model does not look.
            prove_all: compare the logits of all positions.

        Raises:
            FinetuneError: the proof failed.
        """
        self._captured.clear()
        length = tokens_BS.size(1)
        most = length if prove_all else min(length, _PROVEN_POSITIONS)
        keep_K = torch.linspace(0, length - 1, most, device=tokens_BS.device).round().long()
        logits_BKV = self.model(
            input_ids=tokens_BS, use_cache=False, logits_to_keep=keep_K
        ).logits
        if len(self._captured) != 1:
            raise FinetuneError(
                f"the final norm must run once per forward, it ran {len(self._captured)} times"
            )
        hidden_BSH = self.norm_output_BSH
        if not torch.equal(self._output(hidden_BSH[:, keep_K]), logits_BKV):
            raise FinetuneError(
                "the output layer applied to the captured hidden states does not give the model's "
                "logits: something follows its final norm, and the head was not made for that"
            )
        return hidden_BSH

    @torch.no_grad()
    def greedy(self, hidden_NH: Tensor) -> Tensor:
        """The model's most likely next token behind each row, int64 [n]."""
        return self._output(hidden_NH).argmax(-1)

    def checksum(self) -> str:
        """Of every parameter and buffer, to the bit."""
        digest = hashlib.sha256()
        for name, tensor in [*self.model.named_parameters(), *self.model.named_buffers()]:
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()
