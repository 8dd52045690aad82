"""The rows that `verify` compares on: token ids, and the hidden states a target has for them.

B: batch, S: sequence, H: hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from tools.mtp_checkpoint.errors import CheckpointError
from tools.mtp_checkpoint.source import HFDirectory
from tools.mtp_checkpoint.target_matrices import EMBEDDINGS, first_of

_ROOM = 1.25  # memory that loading and running takes, relative to the weights in float32


@dataclasses.dataclass(frozen=True)
class Rows:
    """What both heads are given.

    Attributes:
        token_ids_BS: int64.
        hidden_BSH: The target's hidden states after its final norm, float32.
        pre_norm_BSH: The same before its final norm; None where no target was run.
        source: In words, where they come from.
    """

    token_ids_BS: Tensor
    hidden_BSH: Tensor
    pre_norm_BSH: Tensor | None
    source: str

    @property
    def position_ids_BS(self) -> Tensor:
        """0 to S-1 in every row."""
        batch, length = self.token_ids_BS.shape
        return torch.arange(length).expand(batch, length)


def random_rows(directory: HFDirectory, batch: int, length: int, seed: int) -> Rows:
    """Random tokens, and hidden states drawn from N(0, 1): needs nothing of the target."""
    vocabulary, hidden = directory.tensors[first_of(directory, EMBEDDINGS)].shape
    generator = torch.Generator().manual_seed(seed % 2**63)  # torch takes 64 bits
    ids_BS = torch.randint(vocabulary, (batch, length), generator=generator)
    hidden_BSH = torch.randn(batch, length, hidden, generator=generator)
    return Rows(ids_BS, hidden_BSH, None, f"random tokens and hidden states, seed {seed}")


def target_rows(directory: HFDirectory, text: Path | None, batch: int, length: int) -> Rows:
    """Run the target, through transformers and in float32, on a text.

    Args:
        text: A UTF-8 file; None takes the manual that ships with Python. It is tokenized as
            plain text and must fill ``batch`` rows of ``length`` tokens.

    Raises:
        CheckpointError: transformers cannot load the target or its tokenizer, the target does not
            fit into memory, or the text is too short.
    """
    _require_memory(directory)
    with _quiet_transformers(), torch.no_grad():
        ids_BS = _token_rows(directory, text, batch, length)
        model = _load_target(directory)
        decoder, before = model.get_decoder(), []
        hook = decoder.norm.register_forward_pre_hook(lambda _m, args: before.append(args[0]))
        hidden = [decoder(input_ids=row_S[None]).last_hidden_state for row_S in ids_BS]
        hook.remove()
    name = text.name if text else "Python's manual"
    return Rows(ids_BS, torch.cat(hidden), torch.cat(before), f"{type(model).__name__} on {name}")


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No bars and no advice on faster kernels between the lines of a report."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _load_target(directory: HFDirectory):
    from transformers import AutoModelForCausalLM

    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            directory.path,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # the last: other shapes
        raise CheckpointError(
            f"transformers cannot load the target in {directory.path} ({error}). Use --rows-from "
            "random to compare the heads without it."
        ) from error
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"{directory.path} lacks {len(missing)} tensors of the target, such as {missing[0]}. "
            "Use --rows-from random to compare the heads without it."
        )
    return model.eval()


def _token_rows(directory: HFDirectory, text: Path | None, batch: int, length: int) -> Tensor:
    from transformers import AutoTokenizer

    try:
        content = text.read_text(encoding="utf-8") if text else _bundled_text()
        tokenizer = AutoTokenizer.from_pretrained(directory.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"no tokens to run the target on ({error}). Use --rows-from random to go without."
        ) from error
    # A token is at least one character of these: enough text, and not a whole book of it.
    ids = tokenizer(content[: 16 * batch * length], add_special_tokens=False)["input_ids"]
    if len(ids) < batch * length:
        raise CheckpointError(
            f"the text has {len(ids)} tokens; expected at least {batch} rows of {length}. Give a "
            "longer --text or fewer --sequences."
        )
    vocabulary = directory.tensors[first_of(directory, EMBEDDINGS)].shape[0]
    if (largest := max(ids)) >= vocabulary:
        raise CheckpointError(
            f"the tokenizer gives token {largest}, but the embedding has {vocabulary} rows: they "
            "are of different models"
        )
    return torch.tensor(ids[: batch * length]).view(batch, length)


def _bundled_text() -> str:
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def _require_memory(directory: HFDirectory) -> None:
    import psutil

    elements = sum(torch.Size(info.shape).numel() for info in directory.tensors.values())
    need, free = int(4 * elements * _ROOM), psutil.virtual_memory().available
    if need > free:
        raise CheckpointError(
            f"the target needs about {need / 1e9:.1f} GB in float32, {free / 1e9:.1f} GB are free. "
            "Use --rows-from random to compare the heads without it, or a larger machine."
        )
