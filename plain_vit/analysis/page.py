"""Self-contained HTML pages with embedded figures, readable on a phone and in light and dark mode.

Figures keep their size, so that their text stays readable; a figure wider than the screen scrolls in its own frame.
The content security policy of a page allows only requests for its pictures, and only its own script.
"""

import base64
import hashlib
import html
from collections.abc import Sequence
from pathlib import Path

from ..errors import printable


def html_page(title: str, body: str, *, style: str = "", script: str = "", pictures: str = "data:") -> str:
    """Return a complete page.

    Args:
        title: Title as plain text.
        body: HTML below the title.
        style: CSS added after the CSS of all pages.
        script: JavaScript that runs after the body is parsed.
        pictures: Allowed sources of pictures, as in a content security policy (default: only the page itself).
    """
    styles, page = (Path(__file__).with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".html"))
    style = styles + style
    scripts = _hash(script) if script else "'none'"
    policy = (
        f"default-src 'none'; img-src {pictures}; style-src {_hash(style)}; script-src {scripts}; base-uri 'none'; "
        "form-action 'none'"
    )
    element = f"<script>{script}</script>\n" if script else ""
    return page.format(policy=policy, title=plain_text(title), style=style, body=body, script=element)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def plain_text(text: object) -> str:
    """Return a text escaped for HTML: no markup, no control characters, bounded length."""
    return html.escape(printable(str(text)))


def inline_picture(data: bytes, text: str) -> str:
    """Return an image element with embedded data.

    Args:
        data: Content of a PNG file.
        text: Alternative text.
    """
    encoded = base64.b64encode(data).decode("ascii")
    return f'<img src="data:image/png;base64,{encoded}" alt="{plain_text(text)}">'


def html_figure(content: str, caption: str = "") -> str:
    """Return a figure with an optional caption above it.

    Args:
        content: HTML.
        caption: Plain text.
    """
    above = f"<figcaption>{plain_text(caption)}</figcaption>" if caption else ""
    return f"<figure>{above}{content}</figure>"


def html_section(title: str, caption: str, figures: Sequence[str], *, name: str = "", is_pair: bool = False) -> str:
    """Return a section of figures side by side.

    Args:
        title: Title as plain text.
        caption: Caption as plain text.
        figures: HTML.
        name: Name for links to the section.
        is_pair: Whether the figures show two models, for which the page becomes wide enough.
    """
    heading = f'<h2 id="{plain_text(name)}">' if name else "<h2>"
    return (
        f'{heading}{plain_text(title)}</h2><p class="caption">{plain_text(caption)}</p>'
        f'<div class="row{" pair" if is_pair else ""}">{"".join(figures)}</div>'
    )


def framed(content: str, name: str) -> str:
    """Return a frame that scrolls sideways, also by keyboard, if its content is wider than the screen.

    Args:
        content: HTML.
        name: Accessible name, as plain text.
    """
    return f'<div class="frame" tabindex="0" role="group" aria-label="{plain_text(name)}">{content}</div>'


def html_table(head: Sequence[object], rows: Sequence[Sequence[object]], name: str) -> str:
    """Return a table of plain texts in a scrollable frame.

    Args:
        head: Column headings; no heading row if empty.
        rows: Cells.
        name: Accessible name of the table.
    """

    def row(cells: Sequence[object], kind: str) -> str:
        return f"<tr>{''.join(f'<{kind}>{plain_text(cell)}</{kind}>' for cell in cells)}</tr>"

    above = f"<thead>{row(head, 'th')}</thead>" if head else ""
    body = "".join(row(cells, "td") for cells in rows)
    return framed(f"<table>{above}<tbody>{body}</tbody></table>", name)
