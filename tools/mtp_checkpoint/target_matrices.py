"""The target's embedding and output layer, which its head shares.

V: vocabulary, H: hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.source import HFDirectory

EMBEDDINGS = ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight")


def target_matrices(directory: HFDirectory, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The target's embedding and output layer [V, H], which its head shares.

    Raises:
        CheckpointError: One of them is not there, or of another hidden size.
    """
    keys = [first_of(directory, EMBEDDINGS)]
    if not any(c.get("tie_word_embeddings") for c in (directory.config, directory.text_config)):
        keys.append(first_of(directory, ("lm_head.weight",)))
    for key in keys:
        shape, hidden = directory.tensors[key].shape, directory.text_config["hidden_size"]
        if shape[1:] != (hidden,):
            wanted = (*shape[:1], hidden)
            raise CheckpointError(f"{key} has shape {shape}, config.json asks for {wanted}")
    matrices = [directory.read(key).to(dtype) for key in keys]
    return matrices[0], matrices[-1]


def first_of(directory: HFDirectory, keys: tuple[str, ...]) -> str:
    """The first of these keys that the directory has.

    Raises:
        CheckpointError: It has none.
    """
    for key in keys:
        if key in directory.tensors:
            return key
    raise CheckpointError(f"{directory.path}: expected a tensor {' or '.join(keys)}")
