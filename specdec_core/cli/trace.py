"""`--trace`: every round on stderr, in colours where there are any; the marks say the same without."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from specdec_core.contract.draft import HOLE, ROOT

if TYPE_CHECKING:
    from specdec_core.engine.loop import Round

_STYLES = {"+": "green", "-": "red", ">": "bold yellow", "*": "bold cyan"}
_LEGEND = "specdec: trace: round, accepted/drafted, + accepted  - rejected  > recovered  * bonus"


class Trace:
    """Prints the rounds of one row as they come.

    A chain is one line: its tokens, and then the token that the target added. A branch of a tree goes on
    in a line of its own, indented below its parent.
    """

    def __init__(self, tokenizer: Any, console: Console | None = None) -> None:
        self._tokenizer = tokenizer
        self._console = console or Console(stderr=True, highlight=False)
        self._rounds = 0

    def __call__(self, done: Round) -> None:
        """Print a round."""
        if not self._rounds:
            self._print(Text(_LEGEND))
        self._rounds += 1
        nodes = _Nodes(done)
        counts = f"{len(nodes.path)}/{len(nodes.parents)}"
        member = f"{nodes.source}: " if nodes.source else ""
        head = Text(f"{self._rounds:5} {counts:>5}  {member}", style="dim")
        indent = len(head.plain)
        for depth, line in self._lines(nodes):
            for start, row in _packed(line, self._console.width - indent - 2 * depth):
                lead = head if head else Text(" " * indent)
                self._print(Text.assemble(lead, " " * (2 * depth + (0 if start else 2)), row))
                head = Text()

    def _lines(self, nodes: _Nodes) -> Iterator[tuple[int, list[Text]]]:
        """Give each line's indentation and pieces."""
        if nodes.is_chain:
            yield 0, [self._node(nodes, node) for node in nodes.parents] + self._added(nodes, None)
        else:
            yield from self._branches(nodes, ROOT, 0, [])

    def _branches(
        self, nodes: _Nodes, parent: int, depth: int, line: list[Text]
    ) -> Iterator[tuple[int, list[Text]]]:
        """Follow a line down to where it branches, then each branch."""
        children, added = nodes.children(parent), self._added(nodes, parent)
        while len(children) == 1 and not added:
            line = [*line, self._node(nodes, children[0])]
            children, added = nodes.children(children[0]), self._added(nodes, children[0])
        if not children:
            yield depth, line + added
            return
        if line:
            yield depth, line
            depth += 1
        for child in children:
            yield from self._branches(nodes, child, depth, [self._node(nodes, child)])
        if added:
            yield depth, added

    def _added(self, nodes: _Nodes, parent: int | None) -> list[Text]:
        """Give the target's own token if it hangs on `parent`; None: anywhere."""
        if nodes.added is None or parent not in (None, nodes.last):
            return []
        return [self._piece(">" if nodes.children(nodes.last) else "*", nodes.added)]

    def _node(self, nodes: _Nodes, node: int) -> Text:
        return self._piece("+" if node in nodes.path else "-", nodes.tokens[node])

    def _piece(self, mark: str, token: int) -> Text:
        return Text(f"{mark}{token_text(self._tokenizer, token)}", style=_STYLES[mark])

    def _print(self, line: Text) -> None:
        self._console.print(line, soft_wrap=True)


class _Nodes:
    """The one row of a round, on the host."""

    def __init__(self, done: Round) -> None:
        tokens, parents = done.draft.tokens[0].tolist(), done.draft.parents[0].tolist()
        self.parents = {node: parent for node, parent in enumerate(parents) if parent > HOLE}
        self.tokens = {node: tokens[node] for node in self.parents}
        self.source = done.draft.sources[0] if done.draft.sources else ""  # a combination's member
        self.path = done.outcome.paths[0]
        committed = done.outcome.tokens[0]
        self.added = committed[-1] if len(committed) > len(self.path) else None
        self.last = self.path[-1] if self.path else ROOT

    @property
    def is_chain(self) -> bool:
        return len(set(self.parents.values())) == len(self.parents)

    def children(self, node: int) -> list[int]:
        return [child for child, parent in self.parents.items() if parent == node]


def token_text(tokenizer: Any, token: int) -> str:
    """Quote one token's text; an id where it is not a text by itself."""
    if not 0 <= token < len(tokenizer):
        return f"#{token}"
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not text or "\ufffd" in text:
        return f"#{token}"
    piece = tokenizer.convert_ids_to_tokens(token)
    lost_space = piece.startswith("\u2581") and not text.startswith(" ")  # SentencePiece
    return repr(f" {text}" if lost_space else text)


def _packed(pieces: Iterable[Text], width: int) -> Iterator[tuple[bool, Text]]:
    """Fill lines with pieces, a space between; say of each line whether it is the first."""
    first, line = True, Text()
    for piece in pieces:
        if line and line.cell_len + 1 + piece.cell_len > (width if first else width - 2):
            yield first, line
            first, line = False, Text()
        line = Text.assemble(line, " ", piece) if line else piece
    yield first, line
