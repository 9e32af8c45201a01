"""Pieces of an HTML page that needs nothing from outside; every string that enters one is escaped here."""

import base64
import html
from collections.abc import Iterable, Sequence
from typing import NewType

Html = NewType("Html", str)  # already escaped: only the functions of this module make one

CSS = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.2rem; background: #fff; color: #1a1a1a;
       font: 16px/1.5 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; }
h1 { margin: 0; font-size: 1.7rem; overflow-wrap: anywhere; }
h2 { margin: 2.2rem 0 .6rem; font-size: 1.2rem; }
p { margin: .4rem 0; max-width: 60rem; }
.quiet { color: #555; }
.status { margin: 1rem 0; padding: .7rem 1rem; border-left: .4rem solid #00734f; background: #edf6f2; }
.status.degraded { border-color: #b25d00; background: #fdf3e4; }
.status.failed { border-color: #b3261e; background: #fcecea; }
.status strong { font-size: 1.1rem; }
.status ul { margin: .3rem 0 0; padding-left: 1.2rem; overflow-wrap: anywhere; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(10.5rem, 1fr)); gap: .6rem;
         margin: 0; }
.tiles div { padding: .5rem .8rem; border: 1px solid #ccc; border-radius: .3rem; }
.tiles dt { color: #555; font-size: .85rem; }
.tiles dd { margin: 0; font-size: 1.35rem; font-variant-numeric: tabular-nums; }
.tiles dd small { display: block; color: #555; font-size: .8rem; line-height: 1.35; }
.facts dt { margin-top: .5rem; color: #555; }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 32rem), 1fr));
           gap: 1rem 2rem; }
figure { margin: 0; }
figure h2 { margin-top: 1rem; }
figure img { width: 100%; max-width: 46rem; height: auto; }
figcaption { color: #555; font-size: .9rem; }
.scroll { overflow: auto; max-height: 26rem; border: 1px solid #ccc; border-radius: .3rem; }
table { width: 100%; border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #e3e3e3; }
th { position: sticky; top: 0; background: #f3f3f3; font-weight: 600; white-space: normal;
     vertical-align: bottom; }
th.left, td.left { text-align: left; }
td.wrap { min-width: 16rem; white-space: normal; text-align: left; overflow-wrap: anywhere; }
pre { margin: .4rem 0; padding: .7rem 1rem; background: #f3f3f3; border-radius: .3rem;
      white-space: pre-wrap; overflow-wrap: anywhere;
      font: .85rem/1.45 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
summary { cursor: pointer; }
@media (max-width: 40rem) { body { padding: .8rem; } .tiles { grid-template-columns: 1fr 1fr; } }
@media print { .scroll { max-height: none; overflow: visible; } }
"""


def text(value: object) -> Html:
    return Html(html.escape(str(value)))


def join(pieces: Iterable[Html]) -> Html:
    return Html("\n".join(pieces))


def heading(title: str) -> Html:
    return Html(f"<h2>{text(title)}</h2>")


def paragraph(words: str, *, quiet: bool = False) -> Html:
    opened = '<p class="quiet">' if quiet else "<p>"
    return Html(f"{opened}{text(words)}</p>")


def code(words: str) -> Html:
    return Html(f"<pre>{text(words)}</pre>")


def fold(title: str, content: Html) -> Html:
    """Content that is shown when its title is clicked."""
    return Html(f"<details><summary>{text(title)}</summary>\n{content}\n</details>")


def status(kind: str, headline: str, points: Sequence[str]) -> Html:
    listed = Html(f"<ul>{join(Html(f'<li>{text(point)}</li>') for point in points)}</ul>" if points else "")
    return Html(f'<div class="status {text(kind)}"><strong>{text(headline)}</strong>{listed}</div>')


def tiles(numbers: Iterable[tuple[str, str, str]]) -> Html:
    """Key numbers: what it is, the value with its unit, and a line to read it by."""
    cells = (
        Html(f"<div><dt>{text(name)}</dt><dd>{text(value)}<small>{text(note)}</small></dd></div>")
        for name, value, note in numbers
    )
    return Html(f'<dl class="tiles">{join(cells)}</dl>')


def facts(pairs: Iterable[tuple[str, str]]) -> Html:
    """Questions with their answers in words, for a phone as for a desk."""
    entries = (Html(f"<dt>{text(name)}</dt><dd>{text(answer)}</dd>") for name, answer in pairs)
    return Html(f'<dl class="facts">{join(entries)}</dl>')


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1, wrap_last: bool = False) -> Html:
    """A table that scrolls by itself; its first `left` columns are words, the others numbers."""

    def row(tag: str, cells: Sequence[object]) -> Html:
        classes = ["left" if place < left else "" for place in range(len(cells))]
        if wrap_last:
            classes[-1] = "wrap" if tag == "td" else "left"
        opened = (f'<{tag} class="{name}">' if name else f"<{tag}>" for name in classes)
        return Html("".join(f"{start}{text(cell)}</{tag}>" for start, cell in zip(opened, cells, strict=True)))

    body = join(Html(f"<tr>{row('td', cells)}</tr>") for cells in rows)
    return Html(
        f'<div class="scroll"><table><thead><tr>{row("th", headers)}</tr></thead>\n<tbody>{body}</tbody></table></div>'
    )


def picture(title: str, caption: str, png: bytes) -> Html:
    data = base64.b64encode(png).decode("ascii")
    return Html(
        f'<figure><h2>{text(title)}</h2><img alt="{text(title)}" src="data:image/png;base64,{data}">'
        f"<figcaption>{text(caption)}</figcaption></figure>"
    )


def figures(pictures: Iterable[Html]) -> Html:
    return Html(f'<div class="figures">{join(pictures)}</div>')


def document(title: str, body: Html) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{CSS}</style></head>\n<body>\n{body}\n</body></html>\n"
    )
