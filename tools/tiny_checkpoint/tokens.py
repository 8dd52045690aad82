"""A tokenizer trained on the spot, and the text that it and the target are trained on."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@functools.cache
def sections() -> dict[str, str]:
    """The reference manual's sections that ship with Python, topic to text."""
    from pydoc_data import topics

    return dict(sorted(topics.topics.items()))


def train_tokenizer(vocab: int) -> Any:
    """Train a byte-level BPE of exactly ``vocab`` tokens, special ones first, on `sections`.

    Returns:
        A ``PreTrainedTokenizerFast`` with a chat template in the ChatML form.

    Raises:
        ValueError: ``vocab`` has no room for the bytes and special tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(SPECIAL_TOKENS)
    if vocab < least:
        raise ValueError(
            f"vocab: expected at least {least} (bytes and special tokens), got {vocab}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sections().values(), trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def save_tokenizer(tokenizer: Any, directory: Path) -> dict[str, int]:
    """Write the tokenizer's files; return the ids of the special tokens."""
    tokenizer.save_pretrained(directory)
    return {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
