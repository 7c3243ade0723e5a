"""A page that needs nothing but itself: its pictures are in it, and it is readable on a dark and on a light screen."""

import base64
import html

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --text: #1c1c1c; --page: #ffffff; --quiet: #555555; --line: #d5d5d5; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --text: #e8e8e8; --page: #16181b; --quiet: #b0b0b0; --line: #3a3d42; }}
}}
body {{ margin: 0 auto; max-width: 76rem; padding: 1rem 1.5rem 4rem; color: var(--text); background: var(--page);
  font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.6rem; }} h2 {{ font-size: 1.2rem; margin: 2.5rem 0 0.3rem; }}
p {{ max-width: 46rem; margin: 0.3rem 0 0.8rem; }} .caption {{ color: var(--quiet); }}
table {{ border-collapse: collapse; }} td, th {{ padding: 0.25rem 1rem 0.25rem 0; text-align: left;
  border-bottom: 1px solid var(--line); vertical-align: top; }}
.row {{ display: flex; flex-wrap: wrap; gap: 1rem; align-items: flex-start; }}
.row > figure {{ flex: 0 1 auto; max-width: 100%; }} figure {{ margin: 0; }}
body:has(.pair) {{ max-width: 120rem; }}
@media (min-width: 60rem) {{ .pair > figure {{ width: calc(50% - 0.5rem); }} }}
figcaption {{ font-weight: 600; margin-bottom: 0.3rem; }}
img {{ max-width: 100%; height: auto; background: #ffffff; border-radius: 4px; }}
.thumbnails img {{ height: 6rem; width: auto; image-rendering: auto; }}
.thumbnails figcaption {{ font-weight: 400; font-size: 0.85rem; color: var(--quiet); }}
</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def html_page(title: str, body: str) -> str:
    """Return a whole page.

    Args:
        title: Plain text.
        body: HTML that goes below the title.
    """
    return PAGE.format(title=html.escape(title), body=body)


def inline_picture(data: bytes, text: str) -> str:
    """Return an image element that holds its own data.

    Args:
        data: Of a PNG file.
        text: What it shows, for those who cannot see it; plain text.
    """
    encoded = base64.b64encode(data).decode("ascii")
    return f'<img src="data:image/png;base64,{encoded}" alt="{html.escape(text)}">'
