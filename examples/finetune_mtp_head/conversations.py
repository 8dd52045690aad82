"""From a folder of JSONL conversations to token rows in which the assistant's tokens are marked.

One conversation per line::

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}

The tokenizer's own chat template writes the text. Where the template marks generated text itself
(``{% generation %}``) that is used. Elsewhere a turn is what the template adds to the prompt that
it makes of the turns before: from the end of that prompt to the end of the turn, without the white
space after its last token. Templates that write earlier turns differently once others follow them
(dropping their reasoning) have no such place, and are refused; ``split_turns`` makes one sample
per assistant turn instead, each the last of its conversation.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.finetune_mtp_head.errors import FinetuneError

_FIRST_TARGET = 2  # the head at position t predicts token t + 2


@dataclass(frozen=True)
class Conversation:
    """Messages with the place they come from, ``file:line``."""

    messages: list[dict[str, str]]
    source: str


@dataclass(frozen=True)
class Sample:
    """One row: ``tokens`` int64 [n]; ``mask`` bool [n], true for the assistant's tokens."""

    tokens: Tensor
    mask: Tensor
    source: str

    def __len__(self) -> int:
        return self.tokens.numel()


def read_conversations(directory: Path) -> list[Conversation]:
    """Read every ``*.jsonl`` file of a folder, in the order of their names.

    Raises:
        FinetuneError: there is no such folder, no file, no conversation, or one that cannot be
            read, has no assistant turn, or holds something other than text.
    """
    if not directory.is_dir():
        raise FinetuneError(f"{directory} is not a folder; expected one with *.jsonl files")
    files = sorted(directory.glob("*.jsonl"))
    if not files:
        raise FinetuneError(
            f"{directory} holds no *.jsonl file; expected one conversation per line, "
            '{"messages": [{"role": …, "content": …}, …]}'
        )
    found = [conversation for file in files for conversation in _read_file(file)]
    if not found:
        raise FinetuneError(f"the *.jsonl files in {directory} hold no conversation")
    return found


def _read_file(path: Path) -> Iterator[Conversation]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise FinetuneError(f"{path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            source = f"{path}:{number}"
            yield Conversation(_messages(line, source), source)


def _messages(line: str, source: str) -> list[dict[str, str]]:
    try:
        entry = json.loads(line)
    except json.JSONDecodeError as error:
        raise FinetuneError(f"{source} is not JSON: {error}") from error
    messages = entry.get("messages") if isinstance(entry, dict) else None
    if not isinstance(messages, list) or not messages:
        raise FinetuneError(f'{source}: expected {{"messages": [ … ]}} with at least one message')
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise FinetuneError(f"{source}: each message needs a role and a content")
        if not isinstance(message.get("content"), str):
            raise FinetuneError(
                f"{source}: the content of a {message['role']} message must be text, got "
                f"{type(message.get('content')).__name__}; images and other parts are not supported"
            )
    if not any(message["role"] == "assistant" for message in messages):
        raise FinetuneError(
            f"{source} has no assistant turn, so nothing to learn from: "
            f"roles are {', '.join(message['role'] for message in messages)}"
        )
    return messages


class Encoder:
    """Turns conversations into samples with one tokenizer.

    Args:
        tokenizer: a fast Hugging Face tokenizer with a chat template.
        max_length: longest sample in tokens.
        long_samples: "error", "truncate" or "drop" longer ones.
        split_turns: one sample per assistant turn.

    Raises:
        FinetuneError: the tokenizer has no chat template or no offsets.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        long_samples: str = "error",
        split_turns: bool = False,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise FinetuneError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template: put "
                "chat_template.jinja beside it"
            )
        if not tokenizer.is_fast:
            raise FinetuneError(
                f"the tokenizer of {tokenizer.name_or_path} is a slow one, which cannot say "
                "where its tokens lie in the text; a tokenizer.json is needed"
            )
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._long_samples = long_samples
        self._split_turns = split_turns
        self._marks_generation = "generation %}" in str(tokenizer.chat_template)

    def encode(self, conversations: list[Conversation]) -> list[Sample]:
        """All samples, in order.

        Raises:
            FinetuneError: a sample is too long, has no target for the head, or is not written as
                this module's docstring says; or none is left.
        """
        samples = []
        for conversation in conversations:
            for part in self._parts(conversation):
                sample = self._fitted(self._encode(part))
                if sample is not None:
                    samples.append(sample)
        if not samples:
            raise FinetuneError(
                f"no sample is left: all {len(conversations)} conversations are longer than "
                f"{self._max_length} tokens; raise --max-length or use --long-samples truncate"
            )
        return samples

    def _parts(self, conversation: Conversation) -> Iterator[Conversation]:
        if not self._split_turns:
            yield conversation
            return
        for end, message in enumerate(conversation.messages, start=1):
            if message["role"] == "assistant":
                yield Conversation(conversation.messages[:end], conversation.source)

    def _fitted(self, sample: Sample) -> Sample | None:
        """The sample cut to the longest length, or None to drop it."""
        if len(sample) > self._max_length:
            if self._long_samples == "error":
                raise FinetuneError(
                    f"{sample.source} has {len(sample)} tokens, more than --max-length "
                    f"{self._max_length}: raise it, or use --long-samples truncate or drop"
                )
            if self._long_samples == "drop":
                return None
            end = self._max_length
            sample = Sample(sample.tokens[:end], sample.mask[:end], sample.source)
        if not sample.mask[_FIRST_TARGET:].any():
            raise FinetuneError(
                f"{sample.source} has no assistant token that the head could predict in its "
                f"{len(sample)} tokens; raise --max-length or drop the conversation"
            )
        return sample

    def _encode(self, conversation: Conversation) -> Sample:
        if self._marks_generation and not self._split_turns:
            return self._encode_marked(conversation)
        text = self._render(conversation.messages, conversation.source)
        spans = self._spans(conversation, text)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # A token belongs to a turn if all of its characters do.
        mask = [
            any(start <= first and last <= end for start, end in spans)
            for first, last in encoded["offset_mapping"]
        ]
        return Sample(torch.tensor(encoded["input_ids"]), torch.tensor(mask), conversation.source)

    def _encode_marked(self, conversation: Conversation) -> Sample:
        encoded = self._tokenizer.apply_chat_template(
            conversation.messages, return_dict=True, return_assistant_tokens_mask=True
        )
        mask = torch.tensor(encoded["assistant_masks"], dtype=torch.bool)
        return Sample(torch.tensor(encoded["input_ids"]), mask, conversation.source)

    def _spans(self, conversation: Conversation, text: str) -> list[tuple[int, int]]:
        """[start, end) in ``text`` of every assistant turn that is to be learned."""
        messages, source = conversation.messages, conversation.source
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for turn in turns[-1:] if self._split_turns else turns:
            prompt = self._render(messages[:turn], source, add_generation_prompt=True)
            upto = self._render(messages[: turn + 1], source)
            if not (upto.startswith(prompt) and text.startswith(upto)):
                raise FinetuneError(
                    f"{source}: the chat template does not write message {turn + 1} as a "
                    "continuation of those before it, or rewrites it once others follow; use "
                    "--split-turns, or a template with {% generation %}"
                )
            spans.append((len(prompt), len(upto.rstrip())))
        return spans

    def _render(self, messages: list[dict[str, str]], source: str, **options: Any) -> str:
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception as error:  # templates raise what they like
            raise FinetuneError(f"{source}: the chat template refuses it: {error}") from error
