"""Pages that commands write, as a parser sees them."""

from __future__ import annotations

import html.parser
import re

VOID = {"meta", "link", "br"}


class Tags(html.parser.HTMLParser):
    """Elements that are opened and closed, their names for others, and what they load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.loaded, self.text = [], [], [], []
        self.tags = set()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self._note(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self._note(tag, attributes)

    def _note(self, tag, attributes):
        self.tags.add(tag)
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.loaded += [values[name] for name in ("src", "href", "xlink:href") if name in values]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read_page(path):
    """A page's source and its words, after looking at its elements and at what it loads."""
    text = path.read_text(encoding="utf-8")
    tags = Tags(text)
    assert tags.open == [] and len(tags.ids) == len(set(tags.ids))
    assert "script" not in tags.tags
    references = re.findall(r"url\(([^)]*)\)", text) + tags.loaded
    assert all(each.startswith(("#", "data:")) for each in references)
    assert {each[1:] for each in references if each.startswith("#")} <= set(tags.ids)
    assert not re.search(r"https?://(?!www\.w3\.org/)", text)
    return text, " ".join(" ".join(tags.text).split())
