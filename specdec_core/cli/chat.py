"""`specdec chat`: a conversation on the terminal, or one that is piped in."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, TextIO

import typer

from specdec_core.cli import options
from specdec_core.cli.exits import FAILED, Debug
from specdec_core.cli.groups import ChatSampling, Drafting, Model, grouped
from specdec_core.cli.loading import opened
from specdec_core.cli.report import statistics_line
from specdec_core.contract.errors import InvalidParameter, UsageError
from specdec_core.contract.sampling_params import FinishReason
from specdec_core.rows.stats import Stats

if TYPE_CHECKING:
    from specdec_core.contract.sampling_params import SamplingParams
    from specdec_core.engine.decoder import SpecDecoder
    from specdec_core.engine.loop import Round

_HELP = """\
/stats  what was generated, how fast, and how much of the history was fed anew
/undo   take back the last turn
/reset  forget the conversation
/exit   leave; so does the end of the input (Ctrl-D)
A line that ends with \\ goes on in the next one. Ctrl-C stops an answer."""
_GO_ON = "/undo takes back the last turn, /reset begins anew"


@grouped
def chat(
    model: Model,
    system: options.System = None,
    *,
    drafting: Drafting,
    sampling: ChatSampling,
    debug: Debug = False,
) -> None:
    """Talk with a model.

    Each line of the input is said to it; answers go to stdout as they are committed, all else to stderr.
    """
    params = sampling.params()
    if sys.stdin is None:
        raise UsageError("there is no stdin to read from; give a terminal, or pipe lines in")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")
    with opened(model, drafting, params, debug=debug) as (decoder, out):
        failed = _converse(Conversation(decoder, params, system), out)
    if failed and not sys.stdin.isatty():
        raise typer.Exit(FAILED)


class Conversation:
    """What was said, and what it took.

    Raises:
        InvalidParameter: the target's tokenizer has no chat template, or it does not take `system`.
    """

    def __init__(self, decoder: SpecDecoder, params: SamplingParams, system: str | None) -> None:
        self._decoder, self._params = decoder, params
        self._first = [] if system is None else [{"role": "system", "content": system}]
        self.turns: list[Stats] = []
        self.said: list[dict[str, str]] = []
        self._encoded("?")  # what a template refuses shows at once

    def answer(self, text: str, write: Callable[[str], object]) -> str:
        """Say something, and write the answer as it comes; return a remark, mostly empty.

        Raises:
            InvalidParameter: it does not fit into the context; nothing was said then.
        """
        stats: list[Stats] = []

        def watch(done: Round) -> None:
            stats[:] = [done.batch.rows[0].stats]

        stream = self._decoder.stream(self._encoded(text), self._params, watch=watch)
        answer = ""
        ended: FinishReason | None = None
        with _ctrl_c() as pressed, closing(stream):
            for chunk in stream:
                answer += chunk.text
                write(chunk.text)
                ended = chunk.result.finish_reason if chunk.result else None
                if pressed():
                    break
        self.turns += stats
        self.said += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return self._remark(ended)

    def undo(self) -> str:
        """Take back the last turn."""
        if not self.said:
            return "nothing was said yet"
        del self.said[-2:]
        return f"taken back; turns left: {len(self.said) // 2}"

    def reset(self) -> str:
        """Forget all turns."""
        self.said.clear()
        self.turns.clear()
        return "the conversation begins anew"

    def statistics(self) -> str:
        """Sum up the last turn and all of them."""
        if not self.turns:
            return "nothing was generated yet"
        last, every = self.turns[-1], Stats.pooled(self.turns)
        return "\n".join(
            f"{name}: {self._line(stats)}" for name, stats in (("last turn", last), ("all turns", every))
        )

    def _line(self, stats: Stats) -> str:
        verifier = self._decoder.verifier_for([self._params])
        line = statistics_line(self._decoder, [verifier], stats).removeprefix("specdec: ")
        return f"{line}, {stats.reused_tokens} of {stats.prompt_tokens} prompt tokens reused"

    def _encoded(self, text: str) -> tuple[int, ...]:
        """Apply the chat template to all that was said and this, once."""
        from specdec_core.rows.prompts import encode_chat

        messages = [*self._first, *self.said, {"role": "user", "content": text}]
        ids = encode_chat(messages, self._decoder.tokenizer)
        limit = self._decoder.target.context_limit
        if limit is not None and len(ids) >= limit:
            raise InvalidParameter(
                f"the context is full: it holds {limit} tokens, and this makes it {len(ids)}; {_GO_ON}"
            )
        return ids

    def _remark(self, ended: FinishReason | None) -> str:
        if ended is FinishReason.LENGTH:
            return f"cut after {self._params.max_new_tokens} tokens; --max-new-tokens allows for more"
        if ended is FinishReason.CONTEXT:
            return f"the context is full: {_GO_ON}"
        return "stopped" if ended is None else ""


def _converse(conversation: Conversation, out: TextIO) -> int:
    """Take lines until the input ends; return how many could not be answered."""
    commands: dict[str, Callable[[], str]] = {
        "/stats": conversation.statistics,
        "/undo": conversation.undo,
        "/reset": conversation.reset,
        "/help": lambda: _HELP,
    }
    failed = 0
    if sys.stdin.isatty():
        _note("/help lists commands, Ctrl-D leaves")
    for text in _lines(out):
        if text in ("/exit", "/quit"):
            break
        try:
            if re.fullmatch(r"/\w+", text):
                _note(_command(commands, text)())
            else:
                _note(_answered(conversation, text, out))
        except UsageError as error:
            print(f"specdec: error: {error}", file=sys.stderr)
            failed += 1
    return failed


def _command(commands: dict[str, Callable[[], str]], name: str) -> Callable[[], str]:
    if name not in commands:
        raise UsageError(f"no command {name}; /help lists them")
    return commands[name]


def _answered(conversation: Conversation, text: str, out: TextIO) -> str:
    """Write an answer and end its line; return the remark on it."""

    def write(chunk: str) -> None:
        out.write(chunk)
        out.flush()

    remark = conversation.answer(text, write)
    write("\n")
    return remark


def _lines(out: TextIO) -> Iterator[str]:
    """Ask for lines; empty ones are left out, and continued ones joined."""
    while (text := _line(out, "> ")) is not None:
        while text.endswith("\\"):
            text = text[:-1] + "\n" + (_line(out, "| ") or "")
        if text.strip():
            yield text.strip()
    if sys.stdin.isatty():
        print(file=sys.stderr)


def _line(out: TextIO, prompt: str) -> str | None:
    """Read a line, on a terminal with what it offers to edit it; None at the end of the input."""
    if sys.stdin.isatty() and out.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401
        with redirect_stdout(out), suppress(EOFError):
            return input(prompt)
        return None
    if sys.stdin.isatty():
        print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    return line.removesuffix("\n").removesuffix("\r") if line else None


def _note(text: str) -> None:
    for line in text.splitlines():
        print(f"specdec: {line}", file=sys.stderr)


@contextmanager
def _ctrl_c() -> Iterator[Callable[[], bool]]:
    """Tell whether Ctrl-C was pressed, instead of breaking off in mid-round; a second one does that."""
    pressed: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not in the main thread, where no Ctrl-C arrives
        yield lambda: False
        return
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)
