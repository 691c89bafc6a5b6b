"""What mkdocs does on the way from these pages and the docstrings to the site."""

import html
import json
import os
import re
from pathlib import Path
from typing import Any

import griffe
from math_core import LatexToMathML
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)(?:#[^)\s]*)?\)")
NOTEBOOK_LINK = re.compile(r"(\]\([^)\s]*\bnotebooks/[\w-]+)\.ipynb\)")
PARAMETERS = re.compile(r"(\w+(?:, \w+)*): ")
ROLE = re.compile(r":\w+:(?=`)")
MATH = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
NO_PROSE = re.compile(r"(<(pre|code|math|script)\b.*?</\2>|<[^>]+>)", re.DOTALL)
SUBSCRIPT = re.compile(r"(?<![\w.])(Δ?[^\W\d_]′?)_(?:\{([^}<]+)\}|(\w)(?![A-Za-z0-9_]))")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add a page for each notebook; the notebook itself is a file of the site, too, to be downloaded."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        page = notebook_to_markdown(json.loads(file.content_string), Path(file.src_uri).name)
        files.append(File.generated(config, file.src_uri.replace(".ipynb", ".md"), content=page))
    return files


def notebook_to_markdown(notebook: dict[str, Any], name: str) -> str:
    """Return a notebook as Markdown: its text as it is, code and what it printed as blocks."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        parts.append(f"```python\n{source}\n```" if cell["cell_type"] == "code" else source)
        for output in cell.get("outputs", []):
            printed = "".join(output.get("text", output.get("data", {}).get("text/plain", "")))
            parts.append(f"```text\n{printed.rstrip()}\n```")
    parts.insert(1, f"[Download this notebook]({name}), to change it and run it yourself.")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to files outside `docs`, which are no pages of the site, become the names of these files.

    One that leads nowhere is left as it is, for mkdocs to complain about. Links to notebooks lead to their pages, and what
    can be unfolded is Markdown, too.
    """
    markdown = NOTEBOOK_LINK.sub(r"\1.md)", markdown)
    folder = (ROOT / "docs" / page.file.src_uri).parent

    def name(link: re.Match[str]) -> str:
        text, target = link.groups()
        file = Path(os.path.normpath(folder / target))
        if file.is_relative_to(ROOT / "docs") or not file.is_relative_to(ROOT) or not file.exists():
            return link[0]
        path = file.relative_to(ROOT).as_posix()
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return LINK.sub(name, markdown.replace("<details>", "<details markdown>"))


def on_page_content(content: str, **_: Any) -> str:
    """Set equations as MathML, which browsers show without a script, and indices in the text (ξ_i) as subscripts."""
    content = MATH.sub(lambda found: _set_equation(found[1], html.unescape(found[2])), content)
    parts = NO_PROSE.split(content)  # text, tag or block, the block's name, text, …
    texts = [SUBSCRIPT.sub(lambda found: f"{found[1]}<sub>{found[2] or found[3]}</sub>", text) for text in parts[::3]]
    return "".join(a + b for a, b in zip(texts, [*parts[1::3], ""], strict=True))


def _set_equation(tag: str, tex: str) -> str:
    equation = LatexToMathML().convert_with_local_state(tex, displaystyle=tag == "div")
    return f'<{tag} class="equation">{equation}</{tag}>'


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
