"""Data of the fine-tuning example: from conversations to token rows, and what is refused.

    pytest tests/examples/test_finetune_data.py
"""

import functools
import json

import pytest

from tests.support import prepare

prepare()

from examples.finetune_mtp_head.bundled import write_bundled
from examples.finetune_mtp_head.conversations import (
    Conversation,
    Encoder,
    Sample,
    read_conversations,
)
from examples.finetune_mtp_head.errors import FinetuneError
from tests.examples.finetune_support import tiny_model


@functools.cache
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_model())


def with_template(template: str):
    """The tiny tokenizer with another chat template."""
    from transformers import AutoTokenizer

    other = AutoTokenizer.from_pretrained(tiny_model())
    other.chat_template = template
    return other


def said(*turns: str) -> Conversation:
    """A conversation, user first."""
    roles = ("user", "assistant")
    messages = [dict(role=roles[i % 2], content=text) for i, text in enumerate(turns)]
    return Conversation(messages, "here:1")


def learned(sample: Sample, with_tokenizer=None) -> str:
    """What the assistant wrote in a sample."""
    return (with_tokenizer or tokenizer()).decode(sample.tokens[sample.mask])


def test_the_assistants_words_and_end_tokens_are_learned_and_nothing_else():
    [sample] = Encoder(tokenizer(), 200).encode([said("Hello there", "Hi.", "And now?", "Bye!")])
    assert learned(sample) == "Hi.<|im_end|>Bye!<|im_end|>"
    whole = tokenizer().decode(sample.tokens)
    assert whole.startswith("<|im_start|>user\nHello there<|im_end|>\n<|im_start|>assistant\nHi.")


def test_token_ids_are_those_of_the_tokenizers_own_chat_call():
    talk = said("Hello there", "Hi.")
    [sample] = Encoder(tokenizer(), 200).encode([talk])
    own = tokenizer().apply_chat_template(talk.messages, return_dict=True)["input_ids"]
    assert sample.tokens.tolist() == own


def test_a_token_that_reaches_out_of_a_turn_is_not_learned():
    """Without markers a byte-pair token can hold the end of the prompt and the answer's start."""
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    [sample] = Encoder(with_template(template), 200).encode([said("r", "e value of it")])
    first = tokenizer().decode(sample.tokens[0])
    assert first == "re"  # one token over both turns
    assert learned(sample) == " value of it"


def test_a_template_that_marks_generated_text_is_believed():
    marked = with_template(
        "{% for m in messages %}<|im_start|>{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}"
        "{% endif %}<|im_end|>{% endfor %}"
    )
    [sample] = Encoder(marked, 200).encode([said("Hello there", "Hi.", "And?", "Bye!")])
    assert learned(sample) == "Hi.Bye!"


FORGETTING = (  # earlier answers lose their reasoning once another turn follows
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and loop.last %}<think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_rewrites_earlier_turns_is_refused_and_split_turns_helps():
    talk, other = said("One", "1", "Two", "2"), with_template(FORGETTING)
    with pytest.raises(FinetuneError, match="here:1.*message 2.*--split-turns"):
        Encoder(other, 200).encode([talk])
    samples = Encoder(other, 200, split_turns=True).encode([talk])
    assert [learned(s) for s in samples] == ["<think>1<|im_end|>", "<think>2<|im_end|>"]


@pytest.mark.parametrize("policy", ["truncate", "drop"])
def test_long_samples_are_cut_or_dropped_when_asked(policy):
    talks = [said("Q", "a long answer " * 20), said("Q", "short")]
    long, short = Encoder(tokenizer(), 1000).encode(talks)
    assert len(long) > 20 > len(short)
    lengths = [20, len(short)] if policy == "truncate" else [len(short)]
    samples = Encoder(tokenizer(), 20, policy).encode(talks)
    assert [len(sample) for sample in samples] == lengths
    assert samples[-1].tokens.equal(short.tokens)


def test_a_sample_longer_than_the_limit_is_refused():
    with pytest.raises(FinetuneError, match="here:1 has .* tokens, more than --max-length 20"):
        Encoder(tokenizer(), 20).encode([said("Q", "a long answer " * 20)])


def test_an_empty_answer_still_ends():
    [sample] = Encoder(tokenizer(), 100).encode([said("Q", "")])
    assert learned(sample) == "<|im_end|>"


def test_a_sample_whose_answer_is_cut_off_entirely_is_refused():
    talk = said("a long question " * 20, "no")
    with pytest.raises(FinetuneError, match="no assistant token that the head could predict"):
        Encoder(tokenizer(), 20, "truncate").encode([talk])


def test_dropping_everything_is_refused():
    with pytest.raises(FinetuneError, match="no sample is left"):
        Encoder(tokenizer(), 5, "drop").encode([said("Question", "a long answer")])


def test_a_tokenizer_without_a_chat_template_is_refused():
    with pytest.raises(FinetuneError, match="has no chat template"):
        Encoder(with_template(""), 100)


ROW = json.dumps({"messages": said("Q", "A").messages})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "holds no \\*.jsonl file"),
        ("\n\n", "hold no conversation"),
        (f"{ROW}\n{{", "data.jsonl:2 is not JSON"),
        ('{"text": "plain"}', 'data.jsonl:1: expected {"messages"'),
        ('{"messages": []}', "at least one message"),
        ('{"messages": [{"content": "who says?"}]}', "needs a role"),
        ('{"messages": [{"role": "user", "content": "Q"}]}', "data.jsonl:1 has no assistant turn"),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            "must be text, got list; images",
        ),
        (b"\xff\xfe{", "is not UTF-8"),
    ],
)
def test_a_data_folder_that_cannot_be_used_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "data.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FinetuneError, match=message):
        read_conversations(tmp_path)


def test_a_data_folder_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(FinetuneError, match="is not a folder"):
        read_conversations(tmp_path / "nowhere")


def test_files_are_read_in_the_order_of_their_names(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": said(name, "A").messages}))
    (tmp_path / "notes.txt").write_text("not data")
    found = [talk.messages[0]["content"] for talk in read_conversations(tmp_path)]
    assert found == ["a", "b"]


def test_the_bundled_conversations_hold_out_whole_topics_and_repeat_exactly(tmp_path):
    folders = write_bundled(tmp_path / "one")
    again = write_bundled(tmp_path / "two")
    assert write_bundled(tmp_path / "one") == folders  # there already
    topics = []
    for folder, other in zip(folders, again):
        talks = read_conversations(folder)
        assert (folder / "manual.jsonl").read_bytes() == (other / "manual.jsonl").read_bytes()
        assert all(0 < len(talk.messages[1]["content"]) <= 400 for talk in talks)
        topics.append({talk.messages[0]["content"].split("? ")[0] for talk in talks})
    assert len(topics[0]) > 60 and len(topics[1]) > 6 and topics[0].isdisjoint(topics[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]
