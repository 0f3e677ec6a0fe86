"""From anchors (characters of messages) to the tokens of the rendered prompt.

An anchor is a span of characters, never a bare string: a text anchor is looked up once and refused
when it is absent or ambiguous. The chat template is never rewritten: the prompt's token ids are
those of `tokenizer.apply_chat_template`, and the place of every message in the rendered text is
verified by putting the messages back into the template's own parts.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any

import numpy as np

from radar_core.checks import is_whole

__all__ = [
    "Anchor",
    "RenderedPrompt",
    "anchor_mask",
    "anchor_spans",
    "locate",
    "render_chat",
    "render_text",
]

Span = tuple[int, int]
Place = tuple[int, int, int, int]  # message, leading blanks dropped, start and end in the rendering

_CONTEXT = 40  # characters shown around a match in an error
_SHOWN_MATCHES = 5
_BOUNDARY = 16  # characters of the template that must surround a content found by search
_OWN_ARGUMENTS = {
    "tokenize",
    "return_dict",
    "return_tensors",
    "padding",
    "truncation",
    "max_length",
    "sanitize_control_tokens",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}


@dataclass(frozen=True)
class Anchor:
    """A span of characters to steer towards.

    Give either `start` and `end`, or `text` (and which `occurrence` of it, if there are several).

    Args:
        message: index of the message whose content is meant, negative from the end; None means the
            rendered prompt for a span, and any message for a text.
        start: first character of the span.
        end: one past the last character of the span.
        text: a text to look up instead.
        occurrence: which match of the text, counted from 0; None if it must be the only one.

    Raises:
        ValueError: if neither or both ways are given, the span is empty, or a field has the wrong
            type.
    """

    message: int | None = None
    start: int | None = None
    end: int | None = None
    text: str | None = None
    occurrence: int | None = None

    def __post_init__(self) -> None:
        for name in ("message", "start", "end", "occurrence"):
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                hint = f"; a text goes under its name: Anchor(text={value!r})"
                raise ValueError(
                    f"an anchor's {name} must be an int or None, got {value!r}"
                    + hint * isinstance(value, str)
                )
        if self.text is not None:
            if not isinstance(self.text, str):
                raise ValueError(f"an anchor's text must be a str, got {self.text!r}")
            if self.start is not None or self.end is not None:
                raise ValueError("an anchor takes start and end, or text, not both")
            if not self.text.strip():
                raise ValueError(f"an anchor's text must not be blank, got {self.text!r}")
        elif self.start is None or self.end is None:
            raise ValueError("an anchor needs start and end, or text")
        elif not 0 <= self.start < self.end:
            raise ValueError(
                f"an anchor's span needs 0 <= start < end, got ({self.start}, {self.end})"
            )


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt as text and tokens, with the place of every message in it.

    Args:
        text: the prompt as the tokenizer sees it.
        input_ids: its token ids.
        token_spans: the characters (start, end) of `text` that each token covers, in token order.
            The tokens of one multi-byte character overlap; tokens without text are empty.
        content_spans: where each message's content lies in `text`, or None if the template leaves
            it out or rewrites it (`missing` says so) or it is blank.
        contents: the messages' contents as given.
        trimmed: how many leading blanks of each content the template dropped.
        missing: why a content has no span, by the message's index.
    """

    text: str
    input_ids: list[int]
    token_spans: list[Span]
    content_spans: list[Span | None]
    contents: list[str]
    trimmed: list[int]
    missing: dict[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.input_ids)

    def tokens_of(self, span: Span) -> list[int]:
        """Return the indices of the tokens whose characters overlap a span of `text`."""
        start, end = span
        first, last = self._token_bounds
        found: list[int] = ((first < end) & (last > start) & (first < last)).nonzero()[0].tolist()
        return found

    @functools.cached_property
    def _token_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The first character of every token, and the one past its last."""
        bounds = np.array(self.token_spans, dtype=np.int64).reshape(-1, 2)
        return bounds[:, 0], bounds[:, 1]


def locate(text: str, haystack: str, occurrence: int | None = None) -> Span:
    """Find a text in another one.

    Args:
        text: what to look for, character by character; not blank.
        haystack: where to look.
        occurrence: which match to take, counted from 0 (overlapping matches count); None if there
            must be exactly one.

    Returns:
        (start, end) in `haystack`.

    Raises:
        ValueError: if the text is absent (shows the nearest passages), ambiguous (shows where the
            matches are) or the occurrence does not exist.
    """
    _, start, end = _locate(text, [haystack], occurrence)
    return start, end


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    add_generation_prompt: bool = True,
    **template_kwargs: Any,
) -> RenderedPrompt:
    """Render messages with a tokenizer's chat template and find each message in the result.

    The template is rendered twice, once with private-use characters in place of the contents. What
    surrounds them are the template's own parts; the real contents, with or without their outer
    blanks, put between those parts must give the real rendering character by character. Where a
    template changes contents in other ways, those that appear unchanged are searched for.

    Args:
        tokenizer: a transformers tokenizer.
        messages: dicts with "role" and a str "content", oldest first.
        add_generation_prompt: whether to open the assistant's turn at the end.
        **template_kwargs: passed on to `apply_chat_template`, e.g. `tools` or `enable_thinking`.

    Returns:
        The rendered prompt; its ids are those of `tokenizer.apply_chat_template(tokenize=True)`.

    Raises:
        ValueError: if the tokenizer has no chat template, the template refuses the messages, a
            content is no str, or contents cannot be found in the rendering.
    """
    own = _OWN_ARGUMENTS & template_kwargs.keys()
    if own:
        raise ValueError(
            f"{', '.join(sorted(own))}: not available here; the prompt is rendered whole and "
            "tokenised as apply_chat_template does by default"
        )
    if not getattr(tokenizer, "chat_template", None) and "chat_template" not in template_kwargs:
        raise ValueError(
            f"{type(tokenizer).__name__} has no chat template, so messages cannot be rendered; set "
            "tokenizer.chat_template or pass chat_template=, or render the prompt yourself and use "
            "generate with a mask of anchored tokens"
        )
    contents = _contents(messages)

    def apply(chat: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        return _apply_template(
            tokenizer,
            [dict(message) for message in chat],
            add_generation_prompt=add_generation_prompt,
            **template_kwargs,
            **kwargs,
        )

    text = apply(messages, tokenize=False)
    content_spans, trimmed, missing = _place_contents(
        lambda chat: apply(chat, tokenize=False), messages, contents, text
    )
    input_ids, token_spans = _tokenize(tokenizer, text, add_special_tokens=False)
    expected = list(apply(messages, tokenize=True, return_dict=True)["input_ids"])
    if input_ids != expected:
        raise ValueError(
            f"{type(tokenizer).__name__} does not tokenise the rendered chat the way its "
            f"apply_chat_template does ({len(input_ids)} against {len(expected)} tokens), so "
            "anchors cannot be aligned with it"
        )
    return RenderedPrompt(text, input_ids, token_spans, content_spans, contents, trimmed, missing)


def render_text(tokenizer: Any, text: str, add_special_tokens: bool = True) -> RenderedPrompt:
    """Tokenise a plain prompt, for models without a chat template.

    Args:
        tokenizer: a transformers tokenizer.
        text: the prompt; not blank.
        add_special_tokens: whether to add the tokenizer's BOS and the like (never anchored).

    Returns:
        The rendered prompt, as if the text were the content of message 0.

    Raises:
        ValueError: if the text is blank, or the tokenizer's tokens cannot be aligned with it.
    """
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"text must be a str that is not blank, got {text!r}")
    _check_unicode(text, "text")
    input_ids, token_spans = _tokenize(tokenizer, text, add_special_tokens)
    return RenderedPrompt(text, input_ids, token_spans, [(0, len(text))], [text], [0])


def anchor_spans(rendered: RenderedPrompt, anchors: Iterable[str | Anchor | Span]) -> list[Span]:
    """Resolve anchors to spans of the rendered prompt.

    Args:
        rendered: the prompt.
        anchors: each a text that occurs exactly once in the messages, an `Anchor`, or a pair
            (start, end) of characters of the rendered prompt.

    Returns:
        One (start, end) in `rendered.text` per anchor, in their order.

    Raises:
        ValueError: if an anchor is absent, ambiguous, out of range or dropped by the template.
    """
    if isinstance(anchors, str | Anchor):
        raise ValueError(f"anchors must be a list of anchors, got the single {anchors!r}")
    return [_resolve(rendered, anchor) for anchor in anchors]


def anchor_mask(
    rendered: RenderedPrompt, spans: Iterable[Span], include_template: bool = False
) -> list[bool]:
    """Mark the tokens whose characters overlap the anchored ones.

    Args:
        rendered: the prompt.
        spans: (start, end) in `rendered.text`.
        include_template: whether tokens that lie wholly outside the messages' contents (role
            headers, default system prompts) may be anchored; tokens without text (BOS) never are.

    Returns:
        One bool per token, True = anchored; all False without spans.

    Raises:
        ValueError: if a span is out of range or covers no token that may be anchored, or if all
            spans together cover every token of the messages.
    """
    length = len(rendered.text)
    contents = [(0, length)] if include_template else [s for s in rendered.content_spans if s]
    allowed = _marks(contents, length)
    tokenised = _marks(rendered.token_spans, length)
    readable = bytearray(map(int.__and__, allowed, tokenised))
    anchored = bytearray(length)
    for start, end in spans:
        if not 0 <= start < end <= length:
            raise ValueError(
                f"an anchor's span must be within the prompt's {length} characters and not empty, "
                f"got ({start}, {end})"
            )
        if not any(readable[start:end]):
            where = f"the anchor {_shorten(rendered.text[start:end])} at ({start}, {end})"
            if not any(allowed[start:end]):
                raise ValueError(
                    f"{where} covers template text only; pass include_template=True if you mean it"
                )
            raise ValueError(f"{where} has no token: the tokenizer drops these characters")
        anchored[start:end] = readable[start:end]
    mask = _overlapping(rendered.token_spans, anchored)
    if any(mask) and mask == _overlapping(rendered.token_spans, readable):
        raise ValueError(
            f"the anchors cover all {sum(mask)} tokens that may be anchored; steering towards "
            "everything steers towards nothing, so anchor less"
        )
    return mask


def _marks(spans: Iterable[Span], length: int) -> bytearray:
    marks = bytearray(length)
    for start, end in spans:
        marks[start:end] = b"\1" * (end - start)
    return marks


def _overlapping(token_spans: Sequence[Span], marks: bytearray) -> list[bool]:
    counts = list(accumulate(marks, initial=0))
    return [counts[end] > counts[start] for start, end in token_spans]


# --- looking anchors up -------------------------------------------------------------------------


def _resolve(rendered: RenderedPrompt, anchor: str | Anchor | Span) -> Span:
    if isinstance(anchor, str):
        anchor = Anchor(text=anchor)
    elif isinstance(anchor, tuple | list) and len(anchor) == 2:
        anchor = Anchor(start=anchor[0], end=anchor[1])
    if not isinstance(anchor, Anchor):
        raise ValueError(f"an anchor must be a str, an Anchor or (start, end), got {anchor!r}")
    chosen = None if anchor.message is None else _message_index(rendered, anchor.message)
    if anchor.text is not None:
        if chosen is None:
            return _placed(rendered, *_locate(anchor.text, rendered.contents, anchor.occurrence))
        span = locate(anchor.text, rendered.contents[chosen], anchor.occurrence)
        return _placed(rendered, chosen, *span)
    assert anchor.start is not None and anchor.end is not None
    length = len(rendered.text if chosen is None else rendered.contents[chosen])
    if anchor.end > length:
        owner = "the rendered prompt" if chosen is None else f"message {chosen}"
        raise ValueError(
            f"the anchor ({anchor.start}, {anchor.end}) ends beyond the {length} characters of "
            + owner
        )
    if chosen is None:
        return anchor.start, anchor.end
    return _placed(rendered, chosen, anchor.start, anchor.end)


def _message_index(rendered: RenderedPrompt, message: int) -> int:
    count = len(rendered.contents)
    if not -count <= message < count:
        raise ValueError(f"the anchor's message {message} does not exist; there are {count}")
    return message % count


def _placed(rendered: RenderedPrompt, message: int, start: int, end: int) -> Span:
    span = rendered.content_spans[message]
    if span is None:
        raise ValueError(
            f"message {message} cannot be anchored: {rendered.missing.get(message, 'not rendered')}"
        )
    shift = span[0] - rendered.trimmed[message]
    placed = max(span[0], start + shift), min(span[1], end + shift)
    if placed[0] >= placed[1]:
        raise ValueError(
            f"the anchor ({start}, {end}) of message {message} covers only blanks that the chat "
            "template trims"
        )
    return placed


def _locate(text: str, contents: Sequence[str], occurrence: int | None) -> tuple[int, int, int]:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"an anchor's text must be a str that is not blank, got {text!r}")
    matches = [
        (index, start) for index, content in enumerate(contents) for start in _all(text, content)
    ]
    if not matches:
        nearest = _nearest(text, contents)
        hint = f"; the nearest: {'; '.join(nearest)}" if nearest else ""
        raise ValueError(f"the anchor {_shorten(text)} does not occur in the text{hint}")
    if occurrence is None and len(matches) > 1:
        shown = [
            f"occurrence {number}: {_where(contents, index, start, start + len(text))}"
            for number, (index, start) in enumerate(matches[:_SHOWN_MATCHES])
        ]
        more = len(matches) - len(shown)
        raise ValueError(
            f"the anchor {_shorten(text)} occurs {len(matches)} times; choose one with "
            f"occurrence= or by its position: {'; '.join(shown)}"
            + (f"; and {more} more" if more else "")
        )
    if occurrence is not None and not 0 <= occurrence < len(matches):
        raise ValueError(
            f"the anchor {_shorten(text)} has no occurrence {occurrence}; there are "
            f"{len(matches)}, counted from 0"
        )
    index, start = matches[occurrence or 0]
    return index, start, start + len(text)


def _all(text: str, content: str) -> Iterator[int]:
    start = content.find(text)
    while start >= 0:
        yield start
        start = content.find(text, start + 1)


def _where(contents: Sequence[str], index: int, start: int, end: int) -> str:
    content = contents[index]
    around = content[max(0, start - _CONTEXT) : end + _CONTEXT]
    place = (
        f"characters {start}-{end} of message {index}"
        if len(contents) > 1
        else (f"characters {start}-{end}")
    )
    return f"{place} (...{around!r}...)"


def _nearest(text: str, contents: Sequence[str], count: int = 3) -> list[str]:
    """Describe the passages most like a text, best first, compared line by line."""
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(text.casefold())
    found: list[tuple[float, str]] = []
    for index, content in enumerate(contents):
        offset = 0
        for line in content.split("\n"):
            matcher.set_seq1(line.casefold())
            block = matcher.find_longest_match()
            start = max(0, min(block.a - block.b, len(line) - len(text)))
            window = line[start : start + len(text)]
            alike = difflib.SequenceMatcher(None, window.casefold(), text.casefold(), False).ratio()
            if alike >= 0.5:
                begin = offset + start
                place = f"characters {begin}-{begin + len(window)}"
                if len(contents) > 1:
                    place += f" of message {index}"
                found.append((alike, f"{window!r} ({place}, {alike:.0%} alike)"))
            offset += len(line) + 1
    found.sort(key=lambda item: -item[0])
    return [description for _, description in found[:count]]


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 120 else text[:117] + "...")


# --- placing contents in the rendered chat ------------------------------------------------------


def _contents(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    if isinstance(messages, str | Mapping) or not messages:
        raise ValueError(f"messages must be a list of at least one dict, got {messages!r}")
    contents = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} must be a dict with a str 'role', got {message!r}")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            content = ""
        elif "content" not in message:
            keys = ", ".join(map(str, message))
            raise ValueError(f"message {index} lacks the key 'content'; it has {keys}")
        if not isinstance(content, str):
            raise ValueError(
                f"the content of message {index} must be a str, got {type(content).__name__}"
                + ("; join its text parts" if isinstance(content, list) else "")
            )
        _check_unicode(content, f"the content of message {index}")
        contents.append(content)
    return contents


def _check_unicode(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # tokenizers take none
        raise ValueError(
            f"{what} holds half a surrogate pair at character {error.start}; replace it"
        ) from None


def _apply_template(tokenizer: Any, messages: list[dict[str, Any]], **kwargs: Any) -> Any:
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, **kwargs)
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(
            f"the chat template refuses messages with the roles {roles}: {error}. Some templates "
            "take no system message or want user and assistant to alternate"
        ) from error


def _place_contents(
    render: Callable[[Sequence[Mapping[str, Any]]], str],
    messages: Sequence[Mapping[str, Any]],
    contents: Sequence[str],
    text: str,
) -> tuple[list[Span | None], list[int], dict[int, str]]:
    """Find each content in the rendered text, the blanks it lost in front, why any is missing."""
    # A blank content stays as it is: templates may render a message without content differently.
    sentinels = {
        chr(0xF0000) + chr(0x100000 + index): index
        for index, content in enumerate(contents)
        if content.strip()
    }
    by_index = {index: sentinel for sentinel, index in sentinels.items()}
    try:
        probe = render(
            [
                {**message, "content": by_index[index]} if index in by_index else message
                for index, message in enumerate(messages)
            ]
        )
    except ValueError:
        # The template looks into contents and dislikes the stand-ins: only the search is left.
        parts = ["", *(part for sentinel in sentinels for part in (sentinel, ""))]
        found = _search(parts[::2], list(sentinels.values()), contents, text)
    else:
        parts = re.split(f"({'|'.join(sentinels)})", probe) if sentinels else [probe]
        fixed, order = parts[::2], [sentinels[part] for part in parts[1::2]]
        whole = _put_back(fixed, order, contents, text)
        found = _search(fixed, order, contents, text) if whole is None else whole
    spans: list[Span | None] = [None] * len(contents)
    trimmed = [0] * len(contents)
    missing = {}
    for index, content in enumerate(contents):
        places = [place for place in found if place[0] == index]
        if len(places) == 1:
            _, trimmed[index], start, end = places[0]
            spans[index] = start, end
        elif not content.strip():
            missing[index] = "its content is blank"
        elif places:
            missing[index] = f"the chat template writes it {len(places)} times"
        else:
            missing[index] = "the chat template leaves it out or rewrites it"
    if sentinels and not any(spans):
        raise ValueError(
            "no message's content can be found in what the chat template renders: "
            + "; ".join(f"message {index}: {why}" for index, why in missing.items())
        )
    return spans, trimmed, missing


def _put_back(
    fixed: Sequence[str], order: Sequence[int], contents: Sequence[str], text: str
) -> list[Place] | None:
    """Reproduce `text` from the template's parts and the contents; None if that is impossible."""
    if not text.startswith(fixed[0]):
        return None
    # Depth first over the blanks that each content may have lost.
    stack: list[tuple[int, int, Any]] = [(0, len(fixed[0]), None)]
    seen = set()
    while stack:
        step, position, path = stack.pop()
        if step == len(order):
            if position < len(text):
                continue
            places = []
            while path is not None:
                place, path = path
                places.append(place)
            return places[::-1]
        if (step, position) in seen:
            continue
        seen.add((step, position))
        for lead, kept in reversed(_trimmings(contents[order[step]])):
            end = position + len(kept)
            if text.startswith(kept, position) and text.startswith(fixed[step + 1], end):
                place = (order[step], lead, position, end)
                stack.append((step + 1, end + len(fixed[step + 1]), (place, path)))
    return None


def _trimmings(content: str) -> list[tuple[int, str]]:
    """List what templates leave of a content: (blanks dropped in front, the rest), whole first."""
    leads = [0, len(content) - len(content.lstrip("\n")), len(content) - len(content.lstrip())]
    ends = [len(content), len(content.rstrip("\n")), len(content.rstrip())]
    pairs = dict.fromkeys(product(leads, ends))
    return [(lead, content[lead:end]) for lead, end in pairs]


def _search(
    fixed: Sequence[str], order: Sequence[int], contents: Sequence[str], text: str
) -> list[Place]:
    """Find contents that appear unchanged, in order, between the template parts around them.

    A content is placed only if the order of the messages leaves it exactly one place.
    """
    candidates: list[list[Place]] = []
    for step, index in enumerate(order):
        before, after = fixed[step][-_BOUNDARY:], fixed[step + 1][:_BOUNDARY]
        for lead, kept in _trimmings(contents[index]):
            starts = [start + len(before) for start in _all(before + kept + after, text)]
            if starts:
                candidates.append([(index, lead, start, start + len(kept)) for start in starts])
                break
    earliest = _in_order(candidates, lambda place, bound: place[2] >= bound, 0, 3)
    latest = _in_order(
        [places[::-1] for places in candidates[::-1]],
        lambda place, bound: place[3] <= bound,
        len(text),
        2,
    )
    if earliest is None or latest is None:
        return []
    return [early for early, late in zip(earliest, latest[::-1], strict=True) if early == late]


def _in_order(
    candidates: Sequence[Sequence[Place]],
    fits: Callable[[Place, int], bool],
    bound: int,
    next_bound: int,
) -> list[Place] | None:
    taken = []
    for places in candidates:
        place = next((place for place in places if fits(place, bound)), None)
        if place is None:
            return None
        taken.append(place)
        bound = place[next_bound]
    return taken


# --- tokens and their characters ----------------------------------------------------------------


def _tokenize(tokenizer: Any, text: str, add_special_tokens: bool) -> tuple[list[int], list[Span]]:
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(
            text,
            add_special_tokens=add_special_tokens,
            return_offsets_mapping=True,
            verbose=False,
        )
        input_ids = list(encoded["input_ids"])
        spans = [(int(start), int(end)) for start, end in encoded["offset_mapping"]]
        return input_ids, _without_gaps(tokenizer, text, input_ids, spans)
    input_ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    spans = _spans_by_decoding(tokenizer, text, input_ids)
    if add_special_tokens:
        whole = list(tokenizer(text, add_special_tokens=True, verbose=False)["input_ids"])
        before = next(
            (
                start
                for start in range(len(whole) - len(input_ids) + 1)
                if whole[start : start + len(input_ids)] == input_ids
            ),
            None,
        )
        if before is None:
            raise ValueError(
                f"{type(tokenizer).__name__} changes the text's own tokens when it adds special "
                "ones, so anchors cannot be aligned; pass add_special_tokens=False"
            )
        after = len(whole) - len(input_ids) - before
        end = len(text)
        input_ids, spans = whole, [(0, 0)] * before + spans + [(end, end)] * after
    return input_ids, spans


def _without_gaps(
    tokenizer: Any, text: str, input_ids: Sequence[int], spans: list[Span]
) -> list[Span]:
    """Give characters that a fast tokenizer's offsets leave out back to their tokens.

    Byte-level tokenizers with `trim_offsets` cut the blanks that belong to a token off its offsets
    (a token of blanks alone becomes empty), and normalisers that compose characters report the
    first one only.
    """
    if all(_marks(spans, len(text))):
        return spans
    pieces = tokenizer.convert_ids_to_tokens(list(input_ids))
    closed = list(spans)
    covered = 0
    for index, (start, end) in enumerate(spans):
        if text[covered:start].isspace():
            start = max(covered, start - _run(pieces[index], "Ġ"))
            closed[index] = start, max(start, end)
        covered = max(covered, end)
    following = len(text)
    for index in range(len(closed) - 1, -1, -1):
        start, end = closed[index]
        gap = text[end:following]
        if gap.isspace():
            closed[index] = start, end + min(len(gap), _run(pieces[index][::-1], "Ġ"))
        elif gap and start < end:
            # What a normaliser composed with the character before it: all of that one's tokens.
            composed = end + len(gap.split()[0]) * (not gap[0].isspace())
            for same in range(index, -1, -1):
                if closed[same][1] != end:
                    break
                closed[same] = closed[same][0], composed
        following = min(following, start)
    return closed


def _run(piece: str, character: str) -> int:
    return len(piece) - len(piece.lstrip(character))


def _spans_by_decoding(tokenizer: Any, text: str, input_ids: Sequence[int]) -> list[Span]:
    """Find each token's characters by decoding a growing window, for tokenizers without offsets."""

    def decode(start: int, end: int) -> str:
        return tokenizer.decode(
            input_ids[start:end], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )

    spans: list[Span] = []
    start = boundary = position = seen = (
        0  # window, its last whole character, and characters so far
    )
    prefix = ""
    for index in range(len(input_ids)):
        grown = decode(start, index + 1)[len(prefix) :]
        stable = grown.rstrip("\ufffd")  # a character of which only some bytes have come
        now = max(seen, position + len(stable))
        whole = stable == grown and now > seen
        spans.append((seen, min(now + (not whole), len(text))))
        if whole and not text.startswith(grown, position):
            break
        seen = now
        if whole:
            start, boundary, position = boundary, index + 1, now
            prefix = decode(start, boundary)
    if position != len(text) or boundary != len(input_ids):
        raise ValueError(
            f"{type(tokenizer).__name__} reports no character offsets and its tokens do not decode "
            f"back to the text (they part at {_shorten(text[position : position + 40])}), so "
            "anchors cannot be aligned; use the fast version of the tokenizer"
        )
    return spans
