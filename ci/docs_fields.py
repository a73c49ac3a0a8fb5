"""An extension of griffe, which reads the sources for mkdocstrings: a comment at a class's field is its description."""

from __future__ import annotations

import io
import itertools
import tokenize
from typing import Any

from griffe import Attribute, Docstring, Extension


class FieldComments(Extension):
    """Gives the fields of classes their comments, behind the field or in the lines above it, as docstrings."""

    def on_attribute_instance(self, *, attr: Attribute, **kwargs: Any) -> None:
        """Describe an attribute that has no docstring."""
        of = attr.parent
        if attr.docstring is not None or of is None or not of.is_class or attr.lineno is None or of.lineno is None:
            return
        tokens = tokenize.generate_tokens(io.StringIO(attr.source.lstrip()).readline)
        comment = [each.string.split("  # ")[-1].lstrip("# ") for each in tokens if each.type == tokenize.COMMENT][-1:]
        if not comment:
            before = reversed(of.lines[: attr.lineno - of.lineno])
            above = itertools.takewhile(lambda line: line.startswith("#"), map(str.strip, before))
            comment = [line.lstrip("# ") for line in above][::-1]
        if comment:
            attr.docstring = Docstring(" ".join(comment), parent=attr)
