"""Text in figures: names of files and classes are drawn unchanged, and different names stay different.

A name may contain dollar signs, which matplotlib would typeset as mathematics, control characters, or scripts that the
default font lacks. This module turns names into labels; every figure is a `plain_figure`, which draws labels literally.
"""

import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

from ..errors import printable
from ..system.extras import needs

with needs("plain-vit[analysis]"):
    import matplotlib
    from matplotlib import font_manager
    from matplotlib.figure import Figure
    from matplotlib.font_manager import FontProperties
    from matplotlib.ft2font import FaceFlags, FT2Font
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.text import Text
    from matplotlib.ticker import ScalarFormatter

LONGEST = 200  # characters of a title that the caller has not truncated
IGNORES_DIRECTION = tuple(map(int, matplotlib.__version__.split(".")[:2])) < (3, 11)


def plain_figure(width: float, height: float) -> Figure:
    """Return an empty figure that keeps its parts from overlapping and draws its text literally.

    Text is drawn without math text or TeX and with fallback fonts, in any layout. The figure is not an instance of a
    subclass, because libraries recognise matplotlib's `Figure` by its name (gradio's `Plot`).

    Args:
        width: In inches.
        height: In inches.
    """
    figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))
    figure.draw = partial(_draw_plainly, figure)  # type: ignore[method-assign]
    return figure


def _draw_plainly(figure: Figure, renderer: Any) -> None:
    for axes in figure.axes:
        for formatter in (axes.xaxis.get_major_formatter(), axes.yaxis.get_major_formatter()):
            if isinstance(formatter, ScalarFormatter):
                formatter.set_useMathText(False)
                formatter.set_usetex(False)
    for text in figure.findobj(Text):
        text.set_parse_math(False)
        text.set_usetex(False)
        if fonts := _fallback_fonts(frozenset(text.get_text())):
            families = text.get_fontfamily()
            text.set_fontfamily([*families, *(font for font in fonts if font not in families)])
    Figure.draw(figure, renderer)


def drawable(text: str) -> str:
    """Return a text of bounded length, with code points for control characters and characters that no font has.

    Args:
        text: One line or several; line breaks are kept.
    """
    text = str(text)
    shown = printable(text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…")
    if IGNORES_DIRECTION and any(unicodedata.bidirectional(letter) in ("R", "AL") for letter in shown):
        _warn_of_direction()
    if set(map(ord, shown)) <= _letters_of(_default_font()):
        return shown
    lacking = lacking_letters([shown])
    return "".join(f"[U+{ord(letter):04X}]" if letter in lacking else letter for letter in shown)


def one_line(text: str, length: int) -> str:
    """Return a text as `drawable` does, on one line, truncated.

    Args:
        text: One line or several.
        length: Maximum number of characters; wide ones count twice.
    """
    return _cut(drawable(text).replace("\n", r"\n"), length)


def lacking_letters(texts: Iterable[str]) -> str:
    """Return the characters of these texts that no installed font has, and warn about them."""
    letters = frozenset("".join(texts)) - {"\n"}
    covered = set(_letters_of(_default_font()))
    for name in _fallback_fonts(letters):
        covered |= _letters_of(font_manager.findfont(FontProperties(family=[name])))
    lacking = "".join(sorted(letter for letter in letters if ord(letter) not in covered and letter.isprintable()))
    if lacking:
        _warn_of(lacking)
    return lacking


@cache  # warns once
def _warn_of_direction() -> None:
    warnings.warn(
        f"matplotlib {matplotlib.__version__} draws Hebrew, Arabic and other right-to-left text reversed: "
        "pip install 'matplotlib>=3.11'",
        stacklevel=4,
    )


@lru_cache(maxsize=1000)  # warns once for the same characters
def _warn_of(lacking: str) -> None:
    warnings.warn(
        f"no installed font has the characters {lacking[:40]}: figures show their code points; install a font that "
        "has them, such as Noto Sans CJK for Chinese, Japanese and Korean",
        stacklevel=4,
    )


def class_labels(class_names: Sequence[str], length: int = 12) -> list[str]:
    """Return a label for each class: the first of its names (ImageNet's classes list several), truncated.

    Args:
        class_names: Names in the order of the classes.
        length: Maximum number of characters; wide ones count twice.
    """
    names = [str(name) for name in class_names]
    return distinct_labels([name.split(",")[0].strip() or name for name in names], names, length)


def distinct_labels(names: Sequence[str], wholes: Sequence[str], length: int = 12) -> list[str]:
    """Return truncated names, each on one line and all different.

    Names that would be equal when truncated show their ends, then more of the whole name, and finally their index.

    Args:
        names: Names to show.
        wholes: Longer names, used where the names are equal.
        length: Maximum number of characters; wide ones count twice.
    """
    short, whole = ([drawable(name).replace("\n", r"\n") for name in texts] for texts in (names, wholes))
    forms: list[Callable[[int], str]] = [
        lambda i: _cut(short[i], length),
        lambda i: _cut(short[i], length, keep_end=True),
        lambda i: _cut(whole[i], length),
        lambda i: _cut(whole[i], length, keep_end=True),
        lambda i: _cut(short[i], max(2, length - len(f" ({i})"))) + f" ({i})",
    ]
    labels = [forms[0](i) for i in range(len(names))]
    for form in (*forms[1:], forms[-1]):  # a name may look like another name's number
        times = Counter(labels)
        labels = [form(i) if times[label] > 1 else label for i, label in enumerate(labels)]
    return labels


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)


def _cut(text: str, length: int, *, keep_end: bool = False) -> str:
    """Truncate a text at its end or in its middle."""
    if _width(text) <= length:
        return text
    middle = len(text) // 2 if keep_end else len(text)
    head, tail = text[:middle], text[middle:]
    while _width(head) + _width(tail) > length - 1:
        head, tail = (head[:-1], tail) if _width(head) > _width(tail) else (head, tail[1:])
    return f"{head}…{tail}"


def _default_font() -> str:
    return font_manager.findfont(FontProperties())


@cache
def _letters_of(path: str) -> frozenset[int]:
    """Return the characters of a font file; none for a bitmap font, which matplotlib cannot scale."""
    try:
        font = FT2Font(path)
    except (RuntimeError, OSError):
        return frozenset()
    return frozenset(font.get_charmap()) if FaceFlags.SCALABLE in font.face_flags else frozenset()


@lru_cache(maxsize=256)
def _fallback_fonts(letters: frozenset[str]) -> tuple[str, ...]:
    """Return installed font families with the characters that the default font lacks, the best first."""
    needed = {ord(letter) for letter in letters if letter.isprintable()} - _letters_of(_default_font())
    chosen: list[str] = []
    while needed:
        found = {name: needed & _letters_of(path) for name, path in _installed_fonts()}
        best = max(found, key=lambda name: len(found[name]), default=None)
        if best is None or not found[best]:
            break
        chosen.append(best)
        needed -= found[best]
    return tuple(chosen)


@cache
def _installed_fonts() -> tuple[tuple[str, str], ...]:
    """Return family and file of every upright regular font, including fonts that matplotlib's cache lacks."""
    known = {entry.fname for entry in font_manager.fontManager.ttflist}
    for path in font_manager.findSystemFonts():
        if path not in known:
            try:
                font_manager.fontManager.addfont(path)
            except (RuntimeError, OSError):  # not a readable font
                continue
    families = sorted(
        {
            entry.name
            for entry in font_manager.fontManager.ttflist
            if entry.style == "normal"
            and entry.weight in (400, "normal", "regular", "book")
            and not entry.name.startswith("Last Resort")  # a font that draws boxes
        }
    )
    return tuple((family, font_manager.findfont(FontProperties(family=[family]))) for family in families)
