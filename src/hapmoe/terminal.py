"""Building blocks of terminal output: text that is never read as markup, items, bare tables.

rich is imported inside functions, so that importing this module costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hapmoe.wording import clean

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

__all__ = ["cell", "item", "make_table", "say", "show_pairs"]


def say(*texts: str, style: str = "") -> Text:
    """Plain text in one style; the first of several is the styled one. Never markup: names are not ours."""
    from rich.text import Text

    text = Text(clean(texts[0]), style=style if len(texts) == 1 else "")
    if len(texts) > 1:
        text.stylize(style)
        for rest in texts[1:]:
            text.append(clean(rest))
    return text


def cell(text: str, style: str = "") -> Text:
    """Text of the user's or ours as it is: no markup, no control characters."""
    from rich.text import Text

    return Text(clean(text), style=style)


def item(text: str) -> RenderableType:
    """One list item, its continuation lines indented."""
    from rich.padding import Padding
    from rich.table import Table

    grid = Table.grid(padding=0)
    grid.add_column(width=2)
    grid.add_column(overflow="fold")
    grid.add_row("-", cell(text))
    return Padding(grid, (0, 0, 0, 2))


def make_table(*headings: str, title: str = "") -> Table:
    """An empty table with these headings, whose cells wrap rather than being cut."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title or None, title_justify="left", title_style="bold", pad_edge=False)
    table.show_edge = False
    table.padding = (0, 1, 0, 0)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def show_pairs(title: str, pairs: Sequence[tuple[str, str]]) -> RenderableType:
    """A titled list of names and what they are."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table

    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for name, text in pairs:
        grid.add_row(cell(name), cell(text))
    return Group(say(title, style="bold"), Padding(grid, (0, 0, 0, 2)))
