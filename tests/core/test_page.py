"""The page shows every word of a conversation, loads nothing, and lets no text become markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from radar_core.agent_radar import AgentRadar, Chosen
from radar_core.page import PageReply, render_page, write_page
from radar_core.topology import Topology
from radar_core.transcript import Transcript

HOSTILE = (
    "<script>alert(1)</script> <img src=x onerror=alert(1)> \"quoted\" & 'single'. "
    "</textarea></style></script><script>alert(2)</script> {{ 7 * 7 }} {% raw %} {# gone #}\n\n"
    "```html\n<a href='http://example.org'>x</a>\n```\n  indented & kept\t🙂 日本語。"
)


class Encoder:
    """Sentences are as similar as the letters that they share."""

    def encode(self, texts: list[str]) -> np.ndarray:
        counts = [[text.lower().count(chr(97 + place)) for place in range(26)] for text in texts]
        return np.array(counts, dtype=np.float32) + 1e-3


class Reader(HTMLParser):
    """Collects a page's elements with their attributes, and the text of every message body."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.bodies: list[str] = []
        self.marked: list[str] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("meta", "input"):
            return
        self._open.append("message" if dict(attrs).get("class") == "body" else tag)
        if self._open[-1] == "message":
            self.bodies.append("")
        if tag == "mark" and "message" in self._open:
            self.marked.append("")

    def handle_endtag(self, tag: str) -> None:
        opened = self._open.pop()
        assert opened == tag or (opened, tag) == ("message", "div"), (opened, tag)

    def handle_data(self, data: str) -> None:
        # A link inside a mark is the rank, which is no part of the message.
        if "message" not in self._open or "a" in self._open:
            return
        self.bodies[-1] += data
        if "mark" in self._open:
            self.marked[-1] += data


def selection(
    messages: list[tuple[str, int, str]], topology: Topology, receiver: str, **settings
) -> tuple[Transcript, Topology, Chosen]:
    radar = AgentRadar(topology, Encoder(), **settings)
    for sender, round, text in messages:
        radar.observe(sender=sender, round=round, text=text)
    chosen = radar.select(receiver=receiver, query="What does <i>renting</i> the hall cost?")
    return radar.transcript, topology, chosen


def read(page: str) -> Reader:
    reader = Reader()
    reader.feed(page)
    reader.close()
    return reader


@pytest.fixture(scope="module")
def hostile() -> tuple[Transcript, Topology, Chosen]:
    names = ["<b>a</b>\"'&", "b", "c"]
    messages = [(names[0], 0, HOSTILE), ("b", 0, "The hall costs 900 dollars. Bring a friend.")]
    return selection(messages, Topology.complete(names), "c", top_k=2)


def test_every_character_of_every_message_is_shown_as_text(hostile):
    transcript, *_ = hostile
    reader = read(render_page(*hostile))
    assert reader.bodies == [message.text for message in transcript]


def test_texts_never_become_markup(hostile):
    plain = selection([("b", 0, "Nothing special.")], Topology.complete(["b", "c"]), "c")
    hostile_tags = [tag for tag, _ in read(render_page(*hostile, title=HOSTILE)).tags]
    for tag in ("script", "img", "style", "i", "b", "textarea"):
        assert hostile_tags.count(tag) == [tag for tag, _ in read(render_page(*plain)).tags].count(
            tag
        ), tag
    replies = [PageReply(HOSTILE, HOSTILE, {HOSTILE: HOSTILE})]
    page = render_page(*hostile, title=HOSTILE, notes=[HOSTILE], replies=replies)
    assert [tag for tag, _ in read(page).tags].count("script") == 1
    assert "{{ 7 * 7 }}" in page and "49" not in re.sub(r"\d\.\d+", "", page)


def test_the_page_loads_nothing(hostile):
    for tag, attributes in read(render_page(*hostile)).tags:
        assert tag not in ("link", "img", "iframe", "object", "base"), tag
        for name in ("src", "href", "action", "srcset"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    own = render_page(*selection([("b", 0, "Hello.")], Topology.complete(["b", "c"]), "c"))
    assert "http:" not in own and "https:" not in own and "@import" not in own
    assert "url(" not in own and "default-src 'none'" in own


def test_chosen_sentences_are_marked_with_their_rank_and_figures(hostile):
    _, _, chosen = hostile
    page = render_page(*hostile)
    reader = read(page)
    assert len(chosen) == 2
    assert sorted(reader.marked) == sorted(item.text for item in chosen.sentences)
    marks = [attributes for tag, attributes in reader.tags if tag in ("mark", "span")]
    titles = [title for attributes in marks if (title := attributes.get("title"))]
    assert len(titles) == len(chosen.candidates)
    best = chosen.sentences[0]
    assert any(
        title == f"cosine {best.cosine:.3f} × spatial {best.spatial:.3f} × temporal "
        f"{best.temporal:.3f} = score {best.score:.3f}, chosen"
        for title in titles
    )
    links = {attributes.get("href") for tag, attributes in reader.tags if tag == "a"}
    ids = {f"#{attributes['id']}" for _, attributes in reader.tags if "id" in attributes}
    assert {"#rank1", "#rank2", "#message0", "#message1"} <= links <= ids


def test_nothing_chosen_shows_the_nearest_and_what_each_lacked():
    messages = [("a", 0, "Zzz. Qqq."), ("b", 0, "The hall. The rent.")]
    found = selection(messages, Topology.complete(["a", "b", "c"]), "c", threshold=1.0)
    page = render_page(*found)
    assert not read(page).marked
    assert "No sentence was chosen; the nearest" in page
    assert page.count(">lacks 0.") == len(found[2].nearest) == 4


def test_messages_that_do_not_reach_the_receiver_say_so():
    topology = Topology.from_edges([("a", "b")], agents=["a", "b", "c"])
    page = render_page(
        *selection([("a", 0, "One."), ("b", 0, "Two."), ("c", 0, "Three.")], topology, "b")
    )
    assert "1 hop away" in page and "own message" in page and "does not reach b" in page


def test_replies_stand_side_by_side_with_their_figures(hostile):
    replies = [
        PageReply("unsteered", "4,250 euros", {"probability": "14.7%"}),
        PageReply("SPA", "900 euros", {"probability": "35.3%"}),
    ]
    page = render_page(*hostile, replies=replies)
    assert page.index("unsteered") < page.index("14.7%") < page.index("900 euros")
    assert "35.3%" in page and "Replies" in page
    assert "Replies" not in render_page(*hostile)


def test_a_long_conversation_stays_small():
    text = "The hall costs 900 dollars. " * 85
    messages = [(f"agent{place % 9}", place // 9, text) for place in range(130)]
    total = sum(len(text) for *_, text in messages)
    names = [f"agent{place}" for place in range(9)]
    page = render_page(*selection(messages, Topology.complete(names), "agent0"))
    assert total > 300_000 and len(page) < 8 * total
    assert page.count("<article") == 130


def test_control_characters_are_replaced():
    names = ["a\x1b[31m", "b"]
    shown = selection(
        [(names[0], 0, "Bell\x07, null\x00.\tTab\nline.")], Topology.complete(names), "b"
    )
    page = render_page(*shown)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", page)
    assert "Bell\ufffd, null\ufffd" in page and "\t" in page


def test_an_unwritable_page_is_an_error_and_a_good_one_is_utf8(hostile, tmp_path):
    with pytest.raises(OSError):
        write_page(tmp_path / "missing" / "page.html", *hostile)
    target = write_page(tmp_path / "page.html", *hostile)
    assert "日本語" in target.read_text(encoding="utf-8")
