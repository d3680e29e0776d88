"""Chinese paragraphs may be broken anywhere: a line break between two Chinese characters is no space."""

from __future__ import annotations

import itertools
import re
from typing import Any

from docutils import nodes
from docutils.transforms import Transform

_CHARACTER = r"[\u3400-\u9fff]"
_PUNCTUATION = r"[\u2014\u2018-\u201d\u2026\u3000-\u303f\uff00-\uffef]"


def joins(before: str, after: str) -> bool:
    """Whether a line break between these two texts is to vanish; between Chinese and Latin letters it is a space."""
    last, first = before[-1:], after[:1]
    if re.fullmatch(_PUNCTUATION, last) or re.fullmatch(_PUNCTUATION, first):
        return True
    return bool(re.fullmatch(_CHARACTER, last) and re.fullmatch(_CHARACTER, first))


class JoinLines(Transform):
    """Removes the line breaks within paragraphs that a browser would show as spaces."""

    default_priority = 400

    def apply(self, **_: Any) -> None:
        """Change the document in place."""
        for parent in list(self.document.findall(nodes.TextElement)):
            kept: list[nodes.Node] = []
            for child, following in itertools.zip_longest(parent.children, parent.children[1:]):
                is_break = isinstance(child, nodes.Text) and child.astext() == "\n" and kept and following is not None
                if not (is_break and joins(kept[-1].astext(), following.astext())):
                    kept.append(child)
            if len(kept) < len(parent.children):
                parent.children = kept


def setup(app: Any) -> dict[str, bool]:
    """Let Sphinx run the transform."""
    app.add_transform(JoinLines)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
