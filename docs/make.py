"""Write what is generated in the documentation: `python -m docs.make`; with `--check`, only see if it is current."""

import sys
from pathlib import Path

from paceline.cli import policies_markdown

BEGIN, END = "<!-- policies -->\n", "<!-- /policies -->\n"
README = Path(__file__).parent.parent / "README.md"


def with_table(text: str) -> str:
    """`text` with the table of policies between its markers."""
    head, rest = text.split(BEGIN)
    _, tail = rest.split(END)
    return head + BEGIN + policies_markdown() + END + tail


if __name__ == "__main__":
    text = README.read_text()
    if with_table(text) != text:
        if "--check" in sys.argv:
            sys.exit("README.md is not current: run `make docs`")
        README.write_text(with_table(text))
