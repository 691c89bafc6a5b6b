"""Write text that may come from anywhere (names in somebody's store, a vocabulary, a path) to a terminal or a page."""

import re
import sys

CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Characters that control a terminal, begin a new line or turn the direction of text."""


def make_printable(text: str, keep: str = "\n\t") -> str:
    """Replace control characters by a visible one; a terminal would obey them. Those in `keep` stay.

    >>> make_printable("a\\tb\\x1b[2J")
    'a\\tb�[2J'
    """
    return CONTROL.sub(lambda match: match[0] if match[0] in keep else "\N{REPLACEMENT CHARACTER}", text)


def escape_markdown(text: str) -> str:
    """Escape what Markdown would make a tag, a link or a cell of; footnote marks such as <sup>1</sup> stay.

    >>> escape_markdown("<script>|[a](b)")
    '&lt;script>\\\\|[a]\\\\(b)'
    """
    text = re.sub(r"<(?!sup>\d+</sup>|/sup>)", "&lt;", make_printable(text, keep=""))
    return text.replace("](", "]\\(").replace("|", "\\|")


def quote_code(text: str) -> str:
    """Return text as inline code of Markdown. It is escaped, too: a backtick before it could end it early."""
    return f"`{escape_markdown(text).replace('`', chr(39))}`"


def print_line(text: str) -> None:
    """Print one line to stderr in a single write, so that the lines of two processes do not mix."""
    line = make_printable(text.replace("\n", " "), keep="\t")
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def print_error(text: object) -> None:
    """Print what went wrong as one line to stderr."""
    print_line(f"apical: {text}")


def format_duration(seconds: float) -> str:
    """Return a duration as text.

    >>> format_duration(8), format_duration(200), format_duration(7200)
    ('8 s', '3 min', '2.0 h')
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
