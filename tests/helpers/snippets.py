"""The code in the documentation."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?"
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Snippet:
    """A fenced block: its page and line, its language, the file it is, and why it is not run."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    reason: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command of a block for a shell, without variables set before it."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            if words:
                yield words


def snippets(*languages: str) -> list[Snippet]:
    """Return all blocks in these languages, page by page."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in _FENCE.finditer(text):
            line = text[: match.start("language")].count("\n") + 1
            found.append(Snippet(page, line, match["language"], match["title"], match["text"], match["reason"]))
    return [snippet for snippet in found if snippet.language in languages]


FILES = {snippet.title: snippet.text for snippet in snippets("python", "json", "yaml") if snippet.title}
"""Files that the documentation shows whole."""
