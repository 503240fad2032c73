"""Read the text of a report without style, and the requests that a browser would make."""

from html.parser import HTMLParser

ASKING = {"src", "href", "srcset", "action", "data", "poster", "background", "ping"}
VOID = {"meta", "link", "br", "img", "input", "hr"}
SELF_CLOSING = {"line", "path", "rect"}


class Page(HTMLParser):
    """Parses a page, and fails on tags that do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.words, self.tags, self.asked, self._open = [], [], [], []
        self.feed(text)
        assert self._open == [], f"never closed: {self._open}"

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.asked += [(tag, name, value) for name, value in attrs if name in ASKING]
        assert not any(name.startswith("on") for name, _ in attrs), attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in SELF_CLOSING
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        if "style" not in self._open:
            self.words.append(data)
