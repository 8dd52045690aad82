"""A small set of conversations made from the reference manual that ships with Python.

Whole topics are held out, so that the evaluation is on text the head has not seen.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_HELD_OUT_EVERY = 10  # one topic in so many
_LONGEST = 400  # characters per answer: about 150 tokens of a tiny vocabulary, 100 of a large one


def write_bundled(directory: Path) -> tuple[Path, Path]:
    """Write the conversations; return the folders ``train`` and ``held_out`` in ``directory``.

    A complete set that is there already is used again: the text is the same for one Python.
    """
    folders = (directory / "train", directory / "held_out")
    if all((folder / "manual.jsonl").is_file() for folder in folders):
        return folders
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        for folder, lines in zip(folders, _split()):
            (partial / folder.name).mkdir()
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (partial / folder.name / "manual.jsonl").write_text(text, encoding="utf-8")
        partial.chmod(0o755)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folders


def _split() -> tuple[list[dict], list[dict]]:
    from pydoc_data.topics import topics

    train, held_out = [], []
    for number, (topic, text) in enumerate(sorted(topics.items())):
        target = held_out if number % _HELD_OUT_EVERY == 0 else train
        target.extend(_conversations(topic, text))
    return train, held_out


def _conversations(topic: str, text: str) -> Iterator[dict]:
    pieces = _pieces(text)
    for number, piece in enumerate(pieces, start=1):
        question = f"What does the manual say about {topic}? Part {number} of {len(pieces)}."
        yield {
            "messages": [
                {"role": "user", "content": question},
                {"role": "assistant", "content": piece},
            ]
        }


def _pieces(text: str) -> list[str]:
    """Paragraphs, joined up to the longest length; longer ones are cut at a line's end."""
    lines = [line for paragraph in text.split("\n\n") for line in _short(paragraph.strip())]
    pieces: list[str] = []
    for line in filter(None, lines):
        if pieces and len(pieces[-1]) + len(line) + 2 <= _LONGEST:
            pieces[-1] += "\n\n" + line
        else:
            pieces.append(line)
    return pieces


def _short(paragraph: str) -> Iterator[str]:
    while len(paragraph) > _LONGEST:
        cut = paragraph.rfind("\n", 1, _LONGEST)
        cut = cut if cut > 0 else _LONGEST
        yield paragraph[:cut]
        paragraph = paragraph[cut:].lstrip("\n")
    yield paragraph
