"""Escaping of untrusted text in Markdown: it cannot create headings, links, images, HTML or formulas."""

import re
from urllib.parse import urlsplit

from ..errors import printable

LONGEST = 100  # characters of a name or a label
# Characters with a meaning in Markdown, GitHub's tables and mentions, or the Hub's formulas; an underscore inside a
# word has none.
MARKUP = re.compile(r"[\\`*\[\]<>#|~$@&!^]|(?<![^\W_])_|_(?![^\W_])|(?<=:)/(?=/)|(?<=www)\.", re.IGNORECASE)
ADDRESS = re.compile(r"https?://[^\s<>()\[\]{}\"'`\\|^]{1,500}", re.IGNORECASE)


def one_line(text: object, longest: int = LONGEST) -> str:
    """Return a text on one line, with printable characters only, truncated."""
    line = printable(" ".join(str(text)[: 10 * longest].split()))
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def plain(text: object, longest: int = LONGEST) -> str:
    """Return a text escaped so that Markdown shows it unchanged."""
    return MARKUP.sub(r"\\\g<0>", one_line(text, longest))


def code(text: object, longest: int = LONGEST) -> str:
    """Return a code span that the text cannot end."""
    line = one_line(text, longest)
    if not line:
        return ""
    fence = "`" * (_longest_run(line) + 1)
    return f"{fence} {line} {fence}" if "`" in (line[0], line[-1]) else f"{fence}{line}{fence}"


def fenced(text: str, language: str) -> str:
    """Return a code block that the text cannot end."""
    lines = "\n".join(printable(line.replace("\t", "    ")) for line in text.splitlines())
    fence = "`" * max(3, _longest_run(lines) + 1)
    return f"{fence}{language}\n{lines}\n{fence}"


def address(text: object) -> str | None:
    """Return a valid http(s) address, or None for anything else."""
    if not isinstance(text, str) or not text.isascii() or not ADDRESS.fullmatch(text):
        return None
    try:
        parts = urlsplit(text)
        return text if parts.hostname and "@" not in parts.netloc else None
    except ValueError:
        return None


def _longest_run(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)
