"""A report's page as a browser would build it."""

from __future__ import annotations

from html.parser import HTMLParser

PNG = b"\x89PNG\r\n\x1a\n"


class Page(HTMLParser):
    """What a browser would build from the page: its text, tags and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.style = ""
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend((tag, name, value or "") for name, value in attrs)
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.words.append(data)


def assert_self_contained(page: Page) -> None:
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "srcset", "action", "background", "data", "poster"):
            assert value.startswith("data:image/png;base64,"), (tag, name, value[:60])
        assert "url(" not in value
    assert "url(" not in page.style
    assert "@import" not in page.style
