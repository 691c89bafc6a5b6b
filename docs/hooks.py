"""What mkdocs does on the way from these pages and the docstrings to the site."""

import os
import re
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
PARAMETERS = re.compile(r"(\w+(?:, \w+)*): ")
ROLE = re.compile(r":\w+:(?=`)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside `docs`, which are no pages of the site, become the names of these files.

    One that leads nowhere is left as it is, for mkdocs to complain about. What can be unfolded is Markdown, too.
    """
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def name(link: re.Match[str]) -> str:
        text, target = link.groups()
        file = Path(os.path.normpath(folder / target))
        if file.is_relative_to(ROOT / "docs") or not file.is_relative_to(ROOT) or not file.exists():
            return link[0]
        path = file.relative_to(ROOT).as_posix()
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return LINK.sub(name, markdown.replace("<details>", "<details markdown>"))


class Docstrings(griffe.Extension):
    """Docstrings are written for readers of the code; this turns them into the Markdown that a page needs."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and not isinstance(obj, griffe.Class):
            known = {p.name for p in obj.parameters} if isinstance(obj, griffe.Function) else set()
            obj.docstring.value = as_markdown(obj.docstring.value, known)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        if cls.docstring is not None:
            cls.docstring.value = as_markdown(cls.docstring.value, set(cls.members))


def as_markdown(docstring: str, parameters: set[str]) -> str:
    """Doctests as blocks of code, lines that explain a parameter (`lr: the rate …`) as a list, no Sphinx roles.

    >>> as_markdown("Adds.\\n\\na, b: numbers.\\n\\n>>> add(1, 2)\\n3", {"a", "b"}).splitlines()
    ['Adds.', '', '- **a, b**: numbers.', '', '```pycon', '>>> add(1, 2)', '3', '```']
    """
    lines, example = [], False
    for line in [*ROLE.sub("", docstring).splitlines(), ""]:
        if line.startswith(">>> ") and not example:
            lines.append("```pycon")
            example = True
        elif example and not line:
            lines.append("```")
            example = False
        named = PARAMETERS.match(line)
        if named and not example and set(named[1].split(", ")) <= parameters:
            line = f"- **{named[1]}**: {line[named.end() :]}"
        lines.append(line)
    return "\n".join(lines[:-1])
