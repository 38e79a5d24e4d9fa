"""
A trajectory, token by token: who wrote each, what it is, how likely it was, and whether the policy loss sees it.

What to look at when training does not work. It shows in a notebook, in a terminal by `rich`, as text and as a page.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions
from rich.text import Text

from mcp_grpo.types import TokenRole, Trajectory


Author = Literal["prompt", "environment", "policy"]

# What a token is coloured by, with its colour in a terminal: a named one, since only the terminal knows its background.
_KINDS = {
    "prompt": ("bright_black", "the opening prompt"),
    "environment": ("blue", "written by a tool or by the chat template"),
    "choice": ("default", "written by the policy: another token could have stood here"),
    "trigger": ("magenta", "opens a tool call: calling at all is a choice"),
    "straddling": ("red", "syntax of a tool call and a choice in one token"),
    "forced": ("green", "syntax of a valid tool call, where its format left no choice"),
}
_BARS = {"prompt": ("┆", "bright_black"), "environment": ("│", "blue"), "policy": ("┃", "default")}
_MASKED = "dim strike"
_BOUNDS = (0.99, 0.9, 0.5, 0.1)
# How a token is shown whose probability is below so many bounds: in words, in a terminal, and without colours.
_LEVELS = (
    ("p ≥ .99", "", " "),
    ("p < .99", "italic", "▁"),
    ("p < .9", "underline", "▃"),
    ("p < .5", "bold underline", "▅"),
    ("p < .1", "bold reverse", "█"),
)
_MAX_OPEN_PROMPT = 40  # tokens; a longer prompt is folded
_NUM_OPEN_LINES = 3  # at either end of a prompt that is folded in a terminal
_TEXT_WIDTH = 100
_CSS = """
.tv{--ink:31 35 40;--prompt:101 109 118;--environment:9 95 190;--choice:224 98 0;--trigger:130 60 220;\
--straddling:200 30 110;--forced:20 125 60;--good:20 125 60;--bad:200 30 30;color-scheme:light dark;\
color:rgb(var(--ink));background:Canvas;font:13px/1.6 system-ui,sans-serif;padding:14px 18px}
@media(prefers-color-scheme:dark){.tv{--ink:226 230 235;--prompt:140 148 158;--environment:112 172 250;\
--choice:226 104 10;--trigger:160 110 255;--straddling:235 70 150;--forced:45 165 90;--good:75 195 115;--bad:255 115 105}}
.tv-head,.tv-legend,.tv summary{display:flex;flex-wrap:wrap;gap:2px 14px;align-items:baseline}
.tv-head b{font-size:15px}
.tv-legend{margin:6px 0 10px;gap:6px 10px;font-size:12px}
.tv-legend .tv-masked{margin-left:auto}
.tv-ok{color:rgb(var(--good))} .tv-bad{color:rgb(var(--bad))}
.tv details{border-top:1px solid rgb(var(--ink)/.14);padding:6px 0 8px}
.tv summary{cursor:pointer;color:rgb(var(--ink)/.65);font-variant-numeric:tabular-nums}
.tv summary b{color:rgb(var(--ink))}
.tv summary::before{content:"▸";width:.6em} .tv details[open]>summary::before{content:"▾"}
.tv-run{font:12.5px/1.85 ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre-wrap;\
overflow-wrap:anywhere;margin-top:5px;padding:1px 0 1px 10px;border-left:3px solid rgb(var(--hue,var(--ink)))}
.tv-token,.tv-key{border-radius:3px;padding:1px 0 4px;margin-right:1px;-webkit-box-decoration-break:clone;\
box-decoration-break:clone;background-color:rgb(var(--hue,var(--ink))/var(--strength,.06))}
.tv-key{padding:2px 6px 4px}
.tv-token:hover{outline:1.5px solid rgb(var(--ink)/.7)}
.tv-prompt{--hue:var(--prompt);color:rgb(var(--hue))} .tv-environment{--hue:var(--environment);color:rgb(var(--hue))}
.tv-choice{--hue:var(--choice)} .tv-trigger{--hue:var(--trigger)}
.tv-straddling{--hue:var(--straddling)} .tv-forced{--hue:var(--forced)}
.tv-trigger,.tv-straddling,.tv-forced{box-shadow:inset 0 -2px rgb(var(--hue))}
.tv-p1{--strength:.16} .tv-p2{--strength:.3} .tv-p3{--strength:.48} .tv-p4{--strength:.72}
.tv-masked{color:rgb(var(--ink)/.6);\
background-image:repeating-linear-gradient(135deg,rgb(var(--ink)/.16) 0 1px,transparent 1px 5px)}
.tv-run i,.tv-token:empty::before{font-style:normal;opacity:.45}
.tv-newline::before{content:"⏎"} .tv-token:empty::before{content:"⋯"}
.tv-space{background:radial-gradient(circle,currentColor .9px,transparent 1.1px) 0 50%/1ch 1em repeat-x}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewToken:
    """
    One token, with all there is to know about it.

    Args:
        token_id (`int`):
            Its id.
        piece (`bytes`):
            Its bytes, which may begin or end inside a character.
        author (`str`):
            Who wrote it: `"prompt"`, `"environment"` or `"policy"`.
        role (`str`, *optional*, defaults to `"environment"`):
            What it is to its author, as a `TokenRole`.
        logprob (`float`, *optional*):
            Log-probability it was sampled with. `None` where the policy did not write it.
        masked (`bool`, *optional*, defaults to `False`):
            Whether the policy loss leaves it out although the policy wrote it.
        turn (`int`, *optional*):
            The turn it belongs to, from 0; a reply belongs to the turn it answers. `None` before the first.
    """

    token_id: int
    piece: bytes
    author: Author
    role: str = "environment"
    logprob: float | None = None
    masked: bool = False
    turn: int | None = None

    @property
    def kind(self) -> str:
        """Return what it is coloured by: the role of a sampled token, the author of another."""
        return self.role if self.author == "policy" else self.author

    @property
    def level(self) -> int:
        """Return how striking it is: 0 for a token that was all but certain, 4 for an unlikely one."""
        return 0 if self.logprob is None else sum(math.exp(self.logprob) < bound for bound in _BOUNDS)

    @property
    def tooltip(self) -> str:
        """Everything about it, in words."""
        try:
            text = repr(self.piece.decode())
        except UnicodeDecodeError:
            text = repr(self.piece)
        turn = "" if self.turn is None else f" · turn {self.turn}"
        lines = [f"token {self.token_id}  {text}", f"{self.author} · {self.role}{turn}"]
        if self.logprob is None:
            lines.append("not sampled: not in the policy loss")
        else:
            lines.append(f"p = {math.exp(self.logprob):.4g}  (log-prob {self.logprob:.4g})")
            lines.append("masked: not in the policy loss" if self.masked else "not masked: in the policy loss")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewCall:
    """
    One tool call and what came of it.

    Args:
        name (`str`):
            Name of the tool; empty for a call that could not be read.
        kind (`str`):
            What came back, as a `ResultKind`.
        turn (`int`):
            The turn it belongs to, from 0.
    """

    name: str
    kind: str
    turn: int

    def __str__(self) -> str:
        return f"{_visible(self.name)} → {self.kind}" if self.name else self.kind


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TokenView:
    """
    A trajectory to look at, token by token; made by [`Trajectory.explain`].

    A colour says who wrote a token and what it is, its strength how unlikely the token was, hatching (in a terminal:
    a line through it) that the policy loss leaves it out. As text, the line below says the same: `-` is masked, and
    the higher a bar, the less likely.

    Args:
        task_id (`str`):
            What was attempted.
        stop_reason (`str`):
            Why it ended.
        tokens (`tuple[ViewToken, ...]`):
            Prompt and completion, in order.
        calls (`tuple[ViewCall, ...]`, *optional*):
            Every tool call with what came of it.
        reward (`float`, *optional*):
            What it was worth.
        failure (`str`, *optional*):
            What broke, for a trajectory that failed and is not trained on.

    Example:

    ```python
    view = explain(trajectory)
    view  # in a notebook
    rich.print(view)  # in a terminal
    view.save("trajectory.html")
    ```
    """

    task_id: str
    stop_reason: str
    tokens: tuple[ViewToken, ...]
    calls: tuple[ViewCall, ...] = ()
    reward: float | None = None
    failure: str | None = None

    def save(self, path: str | Path) -> None:
        """
        Write a page that needs nothing else.

        Args:
            path (`str` or `Path`):
                HTML file to write.
        """
        page = (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark">'
            f"<title>{escape(_visible(self.task_id))}</title></head>"
            f'<body style="margin:0">{self._repr_html_()}</body></html>\n'
        )
        Path(path).write_text(page, encoding="utf-8")

    def _repr_html_(self) -> str:
        head = "".join(f"<span>{escape(fact)}</span>" for fact in self._facts())
        failed = f'<div class="tv-bad">{escape(self._failed())}</div>' if self.failure is not None else ""
        keys = [(f"tv-{kind}", f"{kind} {n}", _KINDS[kind][1]) for kind, n in self._counts().items()]
        keys += [("tv-masked", "masked", "written by the policy, not in the policy loss")]
        keys += [(f"tv-choice tv-p{level}", name, "sample probability") for level, (name, *_) in enumerate(_LEVELS)]
        legend = "".join(
            f'<span class="tv-key {style}" title="{title}">{escape(name)}</span>' for style, name, title in keys
        )
        return (
            f'<div class="tv"><style>{_CSS}</style><div class="tv-head"><b>{escape(_visible(self.task_id))}</b>{head}'
            f'</div>{failed}<div class="tv-legend">{legend}</div>{"".join(map(_section_html, self._sections()))}</div>'
        )

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        return self._lines(options.max_width, marked=console.color_system is None)

    def __str__(self) -> str:
        return "\n".join(line.plain.rstrip() for line in self._lines(_TEXT_WIDTH, marked=True))

    def __repr__(self) -> str:  # what an interpreter shows
        return str(self)

    def _lines(self, width: int, *, marked: bool) -> Iterator[Text]:
        """Yield what a terminal shows, with marks below each line where there are no colours."""
        yield Text.assemble((_visible(self.task_id), "bold"), "  ", " · ".join(self._facts()))
        if self.failure is not None:
            yield Text(self._failed(), style="red")
        keys = [Text(f"{kind} {n}", _KINDS[kind][0]) for kind, n in self._counts().items()]
        yield Text("  ").join([*keys, Text("- masked") if marked else Text("masked", _MASKED)])
        yield Text("  ").join(Text(f"{mark} {name}" if marked else name, style) for name, style, mark in _LEVELS)
        for section in self._sections():
            yield Text()
            calls = [(f" · {call}", "green" if call.kind == "ok" else "red") for call in section.calls]
            yield Text.assemble((section.title, "bold"), "  ", " · ".join(section.facts), *calls)
            rows = (row for run in _by_author(section.tokens) for row in _rows(run, width - 2))
            lines = [line for row in rows for line in _row_lines(row, marked=marked)]
            if section.folded and (num_hidden := len(lines) - 2 * _NUM_OPEN_LINES) > 1:
                lines[_NUM_OPEN_LINES:-_NUM_OPEN_LINES] = [Text(f"⋮ {num_hidden} more lines", "bright_black")]
            yield from lines

    def _facts(self) -> list[str]:
        num_turns = len({token.turn for token in self.tokens} - {None})
        num_kept = sum(token.kind == "forced" and not token.masked for token in self.tokens)
        return [
            self.stop_reason,
            *([] if self.reward is None else [f"reward {self.reward:.4g}"]),
            _count(num_turns, "turn"),
            *_facts(self.tokens),
            *([f"{num_kept} forced in the loss"] if num_kept else []),
        ]

    def _failed(self) -> str:
        return f"Failed, so in neither the loss nor the baseline of its group. {_visible(self.failure or '')}".strip()

    def _counts(self) -> dict[str, int]:
        counts = Counter(token.kind for token in self.tokens)
        return {kind: counts[kind] for kind in _KINDS}

    def _sections(self) -> Iterator["_Section"]:
        for turn, run in groupby(self.tokens, lambda token: token.turn):
            calls = tuple(call for call in self.calls if call.turn == turn)
            yield _Section("prompt" if turn is None else f"turn {turn}", tuple(run), calls)


class _Section(NamedTuple):
    """What is shown under one heading: the opening, or a turn with the reply to it."""

    title: str
    tokens: tuple[ViewToken, ...]
    calls: tuple[ViewCall, ...]

    @property
    def folded(self) -> bool:
        return self.tokens[0].turn is None and len(self.tokens) > _MAX_OPEN_PROMPT

    @property
    def facts(self) -> list[str]:
        others = Counter(token.author for token in self.tokens if token.author != "policy")
        return _facts(self.tokens) + [_count(n, f"{author} token") for author, n in others.items()]


class _Glyph(NamedTuple):
    """What is shown at one place in a terminal."""

    text: str
    token: ViewToken
    faint: bool


def _facts(tokens: Sequence[ViewToken]) -> list[str]:
    """Return what to say of the tokens that the policy wrote, if it wrote any."""
    logprobs = [token.logprob for token in tokens if token.logprob is not None]
    if not logprobs:
        return []
    share = sum(token.masked for token in tokens) / len(logprobs)
    return [_count(len(logprobs), "policy token"), f"{share:.0%} masked", f"mean log-prob {fmean(logprobs):.2f}"]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _by_author(tokens: Iterable[ViewToken]) -> Iterator[list[tuple[str, ViewToken]]]:
    """Runs of one author, each token with its text. A character over several tokens is the first one's text."""
    for _, group in groupby(tokens, lambda token: token.author):
        run = list(group)
        owners = [number for number, token in enumerate(run) for _ in token.piece]
        texts, position = [""] * len(run), 0
        for char in b"".join(token.piece for token in run).decode(errors="surrogateescape"):
            texts[owners[position]] += char
            position += len(char.encode(errors="surrogateescape"))
        yield list(zip(texts, run, strict=True))


def _parts(text: str) -> Iterator[tuple[str, str]]:
    """Runs of characters that are shown in the same way: as they are, or so that they can be seen."""
    for kind, chars in groupby(text, _shown_as):
        run = "".join(chars)
        yield ("plain" if run == " " else kind), run


def _shown_as(char: str) -> Literal["plain", "space", "newline", "escape"]:
    if char == "\n":
        return "newline"
    return "space" if char == " " else "plain" if char.isprintable() else "escape"


def _escaped(char: str) -> str:
    if "\udc80" <= char <= "\udcff":  # a byte that is no character, as `surrogateescape` has it
        return f"\\x{ord(char) - 0xDC00:02x}"
    return repr(char)[1:-1] if char.isascii() else f"\\u{ord(char):04x}"


def _visible(text: str) -> str:
    """On one line, and without what would do something to a terminal or to the order of the text."""
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _section_html(section: _Section) -> str:
    facts = " · ".join(section.facts)
    calls = "".join(
        f'<span class="{"tv-ok" if call.kind == "ok" else "tv-bad"}">{escape(str(call))}</span>'
        for call in section.calls
    )
    runs = "".join(
        f'<div class="tv-run tv-{run[0][1].author}">{"".join(_token_html(*pair) for pair in run)}</div>'
        for run in _by_author(section.tokens)
    )
    return (
        f"<details{'' if section.folded else ' open'}><summary><b>{section.title}</b><span>{facts}</span>{calls}"
        f"</summary>{runs}</details>"
    )


def _token_html(text: str, token: ViewToken) -> str:
    masked = " tv-masked" if token.masked else ""
    return (
        f'<span class="tv-token tv-{token.kind} tv-p{token.level}{masked}" title="{escape(token.tooltip)}">'
        f"{''.join(_part_html(*part) for part in _parts(text))}</span>"
    )


def _part_html(kind: str, run: str) -> str:
    if kind == "newline":
        return '<i class="tv-newline"></i>\n' * len(run)
    if kind == "space":
        return f'<i class="tv-space">{run}</i>'
    return f"<i>{''.join(map(_escaped, run))}</i>" if kind == "escape" else escape(run)


def _rows(run: Iterable[tuple[str, ViewToken]], width: int) -> Iterator[list[_Glyph]]:
    """Break a run of one author where its text breaks and where the terminal ends."""
    row: list[_Glyph] = []
    room = width
    for text, token in run:
        for kind, part in _parts(text) if text else [("rest", "⋯")]:
            for char in part:
                shown = {"newline": "⏎", "space": "·", "escape": _escaped(char)}.get(kind, char)
                if row and cell_len(shown) > room:
                    yield row
                    row, room = [], width
                row.append(_Glyph(shown, token, faint=kind != "plain"))
                room -= cell_len(shown)
                if kind == "newline":
                    yield row
                    row, room = [], width
    if row:
        yield row


def _row_lines(row: Sequence[_Glyph], *, marked: bool) -> Iterator[Text]:
    bar, style = _BARS[row[0].token.author]
    line, marks = Text(f"{bar} ", style), ""
    for (token, faint), run in groupby(row, lambda glyph: (glyph.token, glyph.faint)):
        text = "".join(glyph.text for glyph in run)
        _, style, mark = _LEVELS[token.level]
        styles = (_KINDS[token.kind][0], style, _MASKED * token.masked, "dim" * faint)
        line.append(text, " ".join(filter(None, styles)))
        marks += ("-" if token.masked else mark) * cell_len(text)
    yield line
    if marked and marks.strip():
        yield Text(f"  {marks}")


def explain(trajectory: Trajectory, *, reward: float | None = None) -> "TokenView":
    """
    Show a trajectory token by token: who wrote each, what it is, how likely it was, and whether the policy loss sees it.

    Args:
        trajectory ([`Trajectory`]):
            The trajectory, such as one of [`MCPGRPOTrainer.roll_out`].
        reward (`float`, *optional*):
            Its reward, to be shown with it.

    Returns:
        [`TokenView`]: Shows in a notebook or a terminal, and can be saved as a page.

    Example:

    ```python
    from mcp_grpo import explain

    trajectory = trainer.roll_out(tasks)[0]
    print(explain(trajectory))
    explain(trajectory).save("trajectory.html")
    ```
    """
    if trajectory.vocabulary is None:
        raise ValueError(
            f"The trajectory of task {trajectory.task.task_id!r} has no `vocabulary` to tell what its tokens say. Those "
            "that `MCPGRPOTrainer.roll_out` returns have one."
        )
    pieces = trajectory.vocabulary.pieces(trajectory.prompt_ids + trajectory.completion_ids)
    length, start = len(trajectory.completion_ids), len(trajectory.prompt_ids)
    tokens = [
        ViewToken(token_id=token_id, piece=piece, author="prompt")
        for token_id, piece in zip(trajectory.prompt_ids, pieces[:start], strict=True)
    ]
    by_author = (TokenRole.ENVIRONMENT, TokenRole.CHOICE)
    roles = trajectory.roles or tuple(by_author[sampled] for sampled in trajectory.sampled_mask)
    masked = (True,) * length if not trajectory.is_learnt_from else trajectory.masked or (False,) * length
    columns = (trajectory.completion_ids, pieces[start:], trajectory.turn_ids, trajectory.logprobs, roles, masked)
    turn = None
    for token_id, piece, turn_id, logprob, role, is_masked in zip(*columns, strict=True):
        sampled = turn_id >= 0
        turn = turn_id if sampled else turn  # a reply belongs to the turn it answers
        tokens.append(
            ViewToken(
                token_id=token_id,
                piece=piece,
                author="policy" if sampled else "environment",
                role=role.value,
                logprob=logprob if sampled else None,
                masked=is_masked and sampled,
                turn=turn,
            )
        )
    return TokenView(
        task_id=trajectory.task.task_id,
        stop_reason=trajectory.stop_reason.value,
        tokens=tuple(tokens),
        calls=tuple(ViewCall(name=e.call.name, kind=e.result.kind.value, turn=e.turn) for e in trajectory.exchanges),
        reward=reward,
        failure=(trajectory.error or "") if trajectory.is_failed else None,
    )
