"""Every error message of this repository, read from the sources without importing them.

A message is kept as a template: its literal text, with `…` for each part that is filled in when it
is raised. Collected are the texts of

- `raise X(text)`, also when the text was put into a variable of the same module before;
- `parser.error(text)`, `sys.exit(text)`, `print(text, file=sys.stderr)`;
- `require_condition(condition, text)`, `Requirement(name, value, text)`, `_some(names, text)`;
- what is put into a list called `problems`, `found` or `wrong`, and what a function returns or
  yields that is annotated with `list[str]` or has a name like `…problem…` or `…message…`.

A `raise` that only passes on what another place has said, such as `raise X(str(error))`, has no
text of its own and is left out.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

GAP = "…"
SOURCES = (
    "megatron/**/*.py",
    "tools/doctor.py",
    "tools/fork.py",
    "tools/forklib/*.py",
    "tools/mtp_checkpoint/**/*.py",
    "tools/tiny_checkpoint/*.py",
    "examples/**/*.py",
)
_LISTS = ("problems", "found", "wrong")
_MAKERS = re.compile("problem|message|failure|require|quantised")
_PLACEHOLDER = re.compile(r"\{\w*(?:![rs])?(?::[^{}]*)?\}")


@dataclass(frozen=True)
class Message:
    """One message and where it is raised."""

    text: str
    where: str

    @property
    def pieces(self) -> list[str]:
        """The literal parts, in order."""
        return [piece for piece in self.text.split(GAP) if piece.strip()]


def squeeze(text: str) -> str:
    """One line, without doubled gaps."""
    text = re.sub(r"\s+", " ", text).strip()
    return re.sub(rf"{GAP}(?:\s?{GAP})+", GAP, text)


class _Texts:
    """Turns an expression into the texts it may have."""

    def __init__(self, names: dict[str, list[ast.expr]]):
        self._names = names

    def of(self, node: ast.expr | None, depth: int = 0) -> list[str]:
        """All texts; a part that is not literal is a gap."""
        if isinstance(node, ast.Constant):
            return [node.value if isinstance(node.value, str) else GAP]
        if isinstance(node, ast.JoinedStr):
            return self._join([self._piece(value, depth) for value in node.values])
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self._join([self.of(node.left, depth), self.of(node.right, depth)])
        if isinstance(node, ast.IfExp):
            return self.of(node.body, depth) + self.of(node.orelse, depth)
        if isinstance(node, ast.Name) and depth < 3:
            return [
                text for value in self._names.get(node.id, []) for text in self.of(value, depth + 1)
            ] or [GAP]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "format" and isinstance(node.func.value, ast.Constant):
                return [_PLACEHOLDER.sub(GAP, node.func.value.value)]
        return [GAP]

    def _piece(self, value: ast.expr, depth: int) -> list[str]:
        """A constant of an f-string, or a filled-in part, which only a module constant spells."""
        if isinstance(value, ast.FormattedValue):
            named = isinstance(value.value, ast.Name) and value.value.id.lstrip("_").isupper()
            return self.of(value.value, depth) if named else [GAP]
        return self.of(value, depth)

    @staticmethod
    def _join(parts: list[list[str]]) -> list[str]:
        texts = [""]
        for part in parts:
            texts = [text + piece for text in texts for piece in part]
        return texts


def _assigned(tree: ast.AST) -> dict[str, list[ast.expr]]:
    """What each name is set to, anywhere in a module."""
    names: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    names.setdefault(target.id, []).append(node.value)
    return names


def _raised(node: ast.Raise) -> list[ast.expr]:
    return list(node.exc.args) if isinstance(node.exc, ast.Call) else []


def _told(node: ast.Call) -> list[ast.expr]:
    """The arguments of a call that are messages."""
    name = ast.unparse(node.func)
    if name in ("parser.error", "sys.exit") or name.endswith("ArgumentTypeError"):
        return node.args[:1]
    if name == "print" and any(
        word.arg == "file" and ast.unparse(word.value) == "sys.stderr" for word in node.keywords
    ):
        return node.args[:1]
    if name.split(".")[-1] == "require_condition":
        return node.args[1:2]
    if name.split(".")[-1] == "Requirement":
        return node.args[2:3]
    if name == "_some" and len(node.args) > 1:
        text = ast.BinOp(ast.Constant(f"{GAP} is "), ast.Add(), node.args[1])
        return [ast.copy_location(text, node)]
    if name in {f"{a}.{verb}" for a in _LISTS for verb in ("append", "extend")}:
        return node.args
    return []


def _elements(node: ast.expr) -> Iterator[ast.expr]:
    """The elements of a list, or the expression itself."""
    if isinstance(node, (ast.List, ast.Tuple)):
        for element in node.elts:
            yield from _elements(element)
    elif isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        yield from _elements(node.elt)
    elif isinstance(node, ast.IfExp):
        yield from _elements(node.body)
        yield from _elements(node.orelse)
    elif isinstance(node, ast.Starred):
        yield from _elements(node.value)
    else:
        yield node


def _returned(function: ast.FunctionDef) -> Iterator[ast.expr]:
    """What a function that makes messages gives back."""
    annotation = ast.unparse(function.returns) if function.returns else ""
    if not (_MAKERS.search(function.name) or "list[str]" in annotation):
        return
    for node in ast.walk(function):
        if isinstance(node, (ast.Return, ast.Yield, ast.YieldFrom)) and node.value is not None:
            yield from _elements(node.value)


def _expressions(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise):
            yield from _raised(node)
        elif isinstance(node, ast.Call):
            for argument in _told(node):
                yield from _elements(argument)
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) in _LISTS:
            yield from _elements(node.value)
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _LISTS:
            yield from _elements(node.value)
        elif isinstance(node, ast.FunctionDef):
            yield from _returned(node)


def messages_of(source: str, where: str) -> list[Message]:
    """The messages of one module.

    Args:
        source: Python text.
        where: what to call the file; the line number is added to it.
    """
    tree = ast.parse(source)
    texts = _Texts(_assigned(tree))
    found = {}
    for node in _expressions(tree):
        for text in map(squeeze, map(_fill, texts.of(node))):
            sentence = len(re.findall(r"[^\W\d_]{2,}", text)) >= 2 or ". " in text
            if sentence and not text.startswith("<"):  # HTML of a report
                found.setdefault(text, Message(text, f"{where}:{node.lineno}"))
    return list(found.values())


def _fill(text: str) -> str:
    """`{shown}` of `require_condition` is filled in later."""
    return text.replace("{shown}", GAP).removeprefix("error: ")


def hook_messages(patch: str, where: str) -> list[Message]:
    """The messages in the lines that a patch adds to upstream's files.

    Args:
        patch: the text of a patch.
        where: its name.
    """
    found = []
    for file in re.split(r"^diff --git ", patch, flags=re.M)[1:]:
        if "\nnew file mode" in file or not file.startswith("a/megatron/"):
            continue
        for block in re.findall(r"(?:^\+(?!\+\+).*\n)+", file, flags=re.M):
            added = [line[1:] for line in block.splitlines()]
            for start, line in enumerate(added):
                if "raise " in line:
                    statement = _statement(added[start:])
                    found += [Message(m.text, where) for m in messages_of(statement, where)]
    return found


def _statement(lines: list[str]) -> str:
    """The shortest beginning of these lines that is a statement."""
    for end in range(1, len(lines) + 1):
        text = textwrap.dedent("\n".join(lines[:end]))
        try:
            ast.parse(text)
        except SyntaxError:
            continue
        return text
    raise ValueError(f"no whole statement begins with {lines[0].strip()!r}: keep it in one hunk")


def collect(root: Path) -> list[Message]:
    """All messages of a checkout of this repository, in the order of files.

    Args:
        root: its top folder.
    """
    found: list[Message] = []
    for pattern in SOURCES:
        for path in sorted(root.glob(pattern)):
            found += messages_of(path.read_text(encoding="utf-8"), str(path.relative_to(root)))
    for path in sorted((root / "patches").glob("*.patch")):
        found += hook_messages(path.read_text(encoding="utf-8"), f"patches/{path.name}")
    return list({message.text: message for message in reversed(found)}.values())[::-1]
