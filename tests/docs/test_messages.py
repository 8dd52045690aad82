"""Every error message has an entry on a troubleshooting page, and every entry a message.

Run: pytest tests/docs/test_messages.py

`python -m tools.docs_site messages` prints the entries that are missing, ready to be filled in.
"""

import textwrap

import pytest

from tests.docs.pages import ROOT
from tools.docs_site import entries
from tools.docs_site.__main__ import main
from tools.docs_site.messages import collect, hook_messages, messages_of

MESSAGES = collect(ROOT)
ENTRIES = entries.collect(ROOT)


def texts(source: str) -> list[str]:
    return [message.text for message in messages_of(textwrap.dedent(source), "here")]


def test_every_message_is_explained():
    missing = entries.unexplained(MESSAGES, ENTRIES)
    assert missing == [], "\n".join(f"{m.where}\n{entries.stub(m)}" for m in missing)


def test_every_entry_belongs_to_a_message():
    assert entries.stale(MESSAGES, ENTRIES) == []


def test_the_tool_prints_an_entry_to_fill_in_that_is_then_read(monkeypatch, capsys):
    (message,) = messages_of("raise ValueError(f'no `{x}` in {y}')", "some/file.py")
    monkeypatch.setattr("tools.docs_site.messages.collect", lambda root: [*MESSAGES, message])
    assert main(["messages"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("some/file.py:1\n- `` no `…` in … ``\n") and "1 without an entry" in said
    assert entries.unexplained([message], entries.entries_of(said, "page")) == []
    monkeypatch.undo()
    assert main(["messages"]) == 0


def test_every_entry_says_something():
    for page in sorted(ROOT.glob(entries.PAGES)):
        items = page.read_text().split("\n- `")[1:]
        for item in items:
            meaning = item.split("\n\n", 1)[1].split("\n\n")[0]
            assert meaning.startswith("    ") and len(meaning.split()) >= 3, item


def test_the_places_that_raise_are_all_looked_at():
    places = {message.where.split(":")[0] for message in MESSAGES}
    for part in (
        "megatron/core/transformer/mtp_objective/layout.py",
        "megatron/training/mtp_training.py",
        "megatron/core/optimizer/chained_layout.py",
        "tools/mtp_checkpoint/source.py",
        "tools/tiny_checkpoint/making.py",
        "examples/finetune_mtp_head/options.py",
        "examples/online_rl/settings.py",
        "tools/forklib/tree.py",
        "patches/0004-isolation.patch",
    ):
        assert part in places, part


@pytest.mark.parametrize(
    ("source", "wanted"),
    [
        ("raise ValueError(f'size must be {n}, got {m!r}')", "size must be …, got …"),
        ("raise ValueError('a very ' 'long ' + f'text of {n}')", "a very long text of …"),
        ("said = 'no such thing'\nraise OSError(said)", "no such thing"),
        ("raise ValueError('one way' if a else 'other way')", ["one way", "other way"]),
        ("raise ValueError('needs {}, got {!r}'.format(a, b))", "needs …, got …"),
        ("_HOW = 'set it to 0'\nraise ValueError(f'bad size: {_HOW}')", "bad size: set it to 0"),
        ("parser.error(f'--seeds is {n}, too few')", "--seeds is …, too few"),
        ("require_condition(x > 0, 'too small: {shown}', x)", "too small: …"),
        ("problems.append(f'{name} is missing')", "… is missing"),
        ("problems = [f'{n} is stale and old' for n in names]", "… is stale and old"),
        ("def _size_problem(n):\n  return f'{n} is no size'", "… is no size"),
        ("def look(n) -> list[str]:\n  return ['it is broken']", "it is broken"),
        ("print(f'error: {e}; try again', file=sys.stderr)", "…; try again"),
    ],
)
def test_a_message_is_found(source, wanted):
    assert texts(source) == ([wanted] if isinstance(wanted, str) else wanted)


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError(str(error))",
        "raise",
        "raise CheckpointError(*problems)",
        "found.append(f'<p>{n} seconds in all</p>')",
    ],
)
def test_what_only_passes_a_message_on_or_is_none_has_none(source):
    assert texts(source) == []


def test_a_message_of_a_hook_is_found_and_one_of_an_added_file_left_to_the_file():
    patch = """\
    diff --git a/megatron/core/old.py b/megatron/core/old.py
    --- a/megatron/core/old.py
    +++ b/megatron/core/old.py
    @@ -1,2 +1,6 @@
     def f(x):
    +    if x:
    +        raise ValueError(
    +            f"x is {x}, which "
    +            "cannot be"
    +        )
         return x
    diff --git a/megatron/core/new.py b/megatron/core/new.py
    new file mode 100644
    --- /dev/null
    +++ b/megatron/core/new.py
    @@ -0,0 +1 @@
    +raise ValueError("of the added file")
    """
    found = hook_messages(textwrap.dedent(patch), "some.patch")
    assert [message.text for message in found] == ["x is …, which cannot be"]


@pytest.mark.parametrize(
    ("entry", "explains"),
    [
        ("rows must be …, got ….", True),
        ("rows must be at least …", True),
        ("…, got ….", False),
        ("…", False),
        ("rows must be at most …", False),
    ],
)
def test_an_entry_explains_a_message_whose_words_it_has(entry, explains):
    (message,) = messages_of("raise ValueError(f'rows must be at least {n}, got {m}.')", "here")
    assert entries.Entry(entry, "page").explains(message) == explains


def test_entries_are_read_with_all_their_messages():
    page = "- `one thing`,\n  `another thing`, `` with `ticks` ``\n\n    Do `this`.\n"
    assert [e.text for e in entries.entries_of(page, "page")] == [
        "one thing",
        "another thing",
        "with `ticks`",
    ]
