"""Loaders of the data sets: Radar's own JSON lines and each benchmark's public format."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from radar_core.checks import is_number, is_whole
from radar_core.evaluation.items import (
    OPTION_LETTERS,
    Choice,
    Conflict,
    Paragraph,
    Problem,
    Question,
    RecordedTalk,
)
from radar_core.json_lines import refusal
from radar_core.relevance import sentence_spans
from radar_core.transcript import Transcript, check_unicode

__all__ = [
    "first_fields",
    "load_choices",
    "load_conflicts",
    "load_problems",
    "load_questions",
    "load_talks",
]

Source = str | PathLike[str]
Record = Mapping[str, Any]
Item = TypeVar("Item")

DATASETS = ("hotpotqa", "musique", "2wiki")
# What a record may be instead of what was expected, by a field that only it has.
_LOOKS = {
    "paragraphs": "this is a question with paragraphs: load_questions, any `radar eval` but dacs",
    "problem": "this is a problem as in MATH-500: load_problems, `radar eval discussion`",
    "options": "this is a choice as in MMLU-Pro: load_choices, `radar eval discussion`",
    "context_answer": "this is a conflict prompt: load_conflicts, `radar eval evidence`",
    "messages": "this is a conversation: load_talks, `radar inspect`",
}
_REASONED = re.compile(r".*\banswer is:?\s*([^\s:].*?)\.?\s*$", re.DOTALL | re.IGNORECASE)


def load_questions(source: Source, dataset: str | None = None) -> list[Question]:
    """Load questions over several paragraphs: HotpotQA, MuSiQue or 2WikiMultihopQA.

    Reads each benchmark's own files (HotpotQA and 2WikiMultihopQA with `context` and
    `supporting_facts`, as pairs or as the hub's dict of lists; MuSiQue with `paragraph_text`) and
    JSON lines of `{"question", "answer", "paragraphs": [{"title", "sentences" | "text",
    "supporting"}]}`. A text without sentences is cut by `radar_core.relevance.sentence_spans`;
    where whole paragraphs are marked, all sentences of a marked one are supporting.

    Args:
        source: a .json, .jsonl or .parquet file, or a data set's name on the hub
            ("name", or "name:split"; the split is "validation" by default).
        dataset: "hotpotqa", "musique" or "2wiki", for whose rules answers are compared by; None
            tells it from the fields.

    Returns:
        The questions, in the file's order.

    Raises:
        ValueError: with file and place, if something in it is unusable: no JSON, a field that is
            missing, of the wrong type or blank, a text with half a surrogate pair.
        ImportError: if a name of the hub is given and `datasets` is not installed.
        OSError: if the file cannot be read.
    """
    if dataset is not None and dataset not in DATASETS:
        raise ValueError(f"dataset is {dataset!r}; expected one of {', '.join(DATASETS)}, or None")
    return _load(source, lambda record, place: _question(record, place, dataset))


def load_problems(source: Source) -> list[Problem]:
    """Load problems of mathematics in MATH-500's format.

    Args:
        source: as in `load_questions`.

    Returns:
        The problems, in the file's order.

    Raises:
        ValueError, ImportError, OSError: as in `load_questions`.
    """
    return _load(source, _problem)


def load_choices(source: Source) -> list[Choice]:
    """Load questions with options in MMLU-Pro's format.

    Options that say "N/A" are left out; the letters of those after one move up.

    Args:
        source: as in `load_questions`.

    Returns:
        The questions, in the file's order.

    Raises:
        ValueError, ImportError, OSError: as in `load_questions`.
    """
    return _load(source, _choice)


def load_conflicts(source: Source) -> list[Conflict]:
    """Load prompts whose text contradicts what models have memorised.

    Args:
        source: as in `load_questions`; fields as in `Conflict`.

    Returns:
        The prompts, in the file's order.

    Raises:
        ValueError, ImportError, OSError: as in `load_questions`.
    """
    return _load(source, _conflict)


def load_talks(source: Source) -> list[RecordedTalk]:
    """Load conversations that failed, in Who&When's format or with a list of `messages`.

    Args:
        source: as in `load_questions`.

    Returns:
        The conversations, in the file's order.

    Raises:
        ValueError, ImportError, OSError: as in `load_questions`.
    """
    return _load(source, _talk)


def first_fields(source: Source) -> frozenset[str]:
    """Return the fields of a file's first record, which tell what loader it is for.

    Args:
        source: as in `load_questions`.

    Returns:
        Their names.

    Raises:
        ValueError, ImportError, OSError: as in `load_questions`.
    """
    for _, record in _records(source):
        return frozenset(record)
    raise ValueError(f"{source} holds no items")


# ---- records -------------------------------------------------------------------------------------


def _load(source: Source, build: Callable[[Record, int], Item]) -> list[Item]:
    items: list[Item] = []
    places: dict[str, str] = {}
    for number, (where, record) in enumerate(_records(source)):
        try:
            item = build(record, number)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        name = item.id  # type: ignore[attr-defined]
        if name in places:
            raise ValueError(f"{where}: the id {name!r} occurs twice, before at {places[name]}")
        places[name] = where
        items.append(item)
    if not items:
        raise ValueError(f"{source} holds no items")
    return items


def _records(source: Source) -> Iterator[tuple[str, Record]]:
    path = Path(source)
    if path.suffix.lower() == ".parquet" and path.exists():
        yield from _parquet(path)
    elif path.exists():
        yield from _json(path)
    elif path.suffix.lower() in (".json", ".jsonl", ".parquet"):
        raise FileNotFoundError(f"{source}: there is no such file")
    else:
        yield from _hub(str(source))


def _json(path: Path) -> Iterator[tuple[str, Record]]:
    text = _decoded(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        if _is_one_value(text, error):
            line = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
            raise ValueError(f"{path}{line}: {refusal(error)}") from None
        yield from _lines(path, text)
        return
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        first = text[: len(text) - len(text.lstrip())].count("\n") + 1
        yield _checked(f"{path}:{first}", value)
        return
    for number, record in enumerate(value):
        yield _checked(f"{path}, item {number}", record)


def _decoded(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}:{line}: {refusal(error)}") from None


def _is_one_value(text: str, error: ValueError | RecursionError) -> bool:
    """Whether a file that is no JSON was meant as one value rather than as JSON lines."""
    read = text[: error.pos] if isinstance(error, json.JSONDecodeError) else ""
    # The first of several JSON lines ends where they stop to be one value, or is broken itself.
    return text.lstrip().startswith("[") or "\n" in read.strip()


def _lines(path: Path, text: str) -> Iterator[tuple[str, Record]]:
    # Not splitlines(): JSON strings may hold U+2028 and its kin unescaped.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: {refusal(error)}") from None
        yield _checked(f"{path}:{number}", record)


def _checked(where: str, record: Any) -> tuple[str, Record]:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(record).__name__}")
    return where, record


def _parquet(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(f"reading {path} needs pyarrow; run: pip install pyarrow") from error
    for number, record in enumerate(parquet.read_table(path).to_pylist()):
        yield _checked(f"{path}, row {number}", record)


def _hub(name: str) -> Iterator[tuple[str, Record]]:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ImportError(
            f"{name} is no file here, and loading it from the hub needs datasets; give a path or "
            "run: pip install datasets"
        ) from error
    name, _, split = name.partition(":")
    for number, record in enumerate(load_dataset(name, split=split or "validation")):
        yield _checked(f"{name}, row {number}", dict(record))


# ---- values, each with the name that it has in the file ------------------------------------------


def _is_there(record: Record, name: str) -> bool:
    """Whether a field says something; in a table of mixed rows, null is no more than a gap."""
    return record.get(name) not in (None, "")


def _field(record: Record, *names: str) -> tuple[str, Any]:
    """The first of several fields that says something, with its name."""
    found = [name for name in names if name in record]
    if not found:
        fields = ", ".join(sorted(record)) or "no fields"
        looks = "".join(f"; {said}" for name, said in _LOOKS.items() if name in record)
        raise ValueError(
            f"the field {' or '.join(map(repr, names))} is missing; got {fields}{looks}"
        )
    name = next((name for name in found if _is_there(record, name)), found[0])
    return name, record[name]


def _text(name: str, value: Any, *, blank: bool = False, number: bool = False) -> str:
    """A text, perhaps a blank one; or a number, where what is asked for may be one."""
    if number and (is_whole(value) or (is_number(value) and math.isfinite(value))):
        return str(value)
    if not isinstance(value, str) or not (blank or value.strip()):
        expected = ("text" if blank else "text that is not blank") + " or a number" * number
        raise ValueError(f"{name} must be {expected}, got {value!r:.60}")
    check_unicode(name, value)
    return value


def _texts(name: str, value: Any, *, blank: bool = False, number: bool = False) -> tuple[str, ...]:
    return tuple(
        _text(f"{name}[{place}]", text, blank=blank, number=number)
        for place, text in enumerate(_list(name, value))
    )


def _optional_text(record: Record, *names: str) -> str:
    """The first of several fields that says something; nothing where none does."""
    name = next((name for name in names if _is_there(record, name)), None)
    return _text(name, record[name], blank=True) if name else ""


def _list(name: str, value: Any, least: int = 0) -> list[Any]:
    if not isinstance(value, list) or len(value) < least:
        expected = "a list of at least one" if least else "a list"
        raise ValueError(f"{name} must be {expected}, got {value!r:.60}")
    return value


def _pairs(name: str, value: Any, first: str, *second: str) -> list[list[Any]]:
    """A list of pairs; the hub has a dict of two lists instead."""
    if isinstance(value, dict):
        one, other = (_list(*_field(value, *names)) for names in ((first,), second))
        if len(one) != len(other):
            raise ValueError(
                f"{name} must have two lists of the same length, got {len(one)} and {len(other)}"
            )
        return [list(pair) for pair in zip(one, other, strict=True)]
    for place, pair in enumerate(_list(name, value)):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(
                f"{name}[{place}] must be a list of {first} and {second[0]}, got {pair!r:.60}"
            )
    return value


def _whole(name: str, value: Any) -> int:
    """A whole number, or its digits."""
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
        return int(value)
    if not is_whole(value) or value < 0:
        raise ValueError(f"{name} must be a whole number of at least 0, got {value!r:.60}")
    return value


def _each(name: str, listed: list[Any], build: Callable[[Record], Item]) -> tuple[Item, ...]:
    """What is built of a list of JSON objects; what is wrong with one is said with its place."""
    built = []
    for place, record in enumerate(listed):
        try:
            if not isinstance(record, dict):
                raise ValueError(f"expected a JSON object, got {record!r:.60}")
            built.append(build(record))
        except ValueError as error:
            raise ValueError(f"{name}[{place}]: {error}") from None
    return tuple(built)


# ---- items ---------------------------------------------------------------------------------------


def _id(record: Record, prefix: str, place: int) -> str:
    for name in ("id", "_id", "unique_id", "question_id", "question_ID"):
        if _is_there(record, name):
            return _text(name, record[name], number=True)
    return f"{prefix}-{place}"


def _question(record: Record, place: int, dataset: str | None) -> Question:
    if _is_there(record, "context"):
        kind, paragraphs = "hotpotqa", _context(record)
        # Only 2WikiMultihopQA has the chain of facts that leads to the answer.
        kind = "2wiki" if "evidences" in record or "evidences_id" in record else kind
    else:
        listed = _list(*_field(record, "paragraphs"), least=1)
        paragraphs = _each("paragraphs", listed, _paragraph)
        kind = "musique" if "text" in listed[0] or "paragraph_text" in listed[0] else "hotpotqa"
        kind = "2wiki" if "reasoned_answer" in record else kind
    return Question(
        _id(record, dataset or kind, place),
        dataset or kind,
        _text(*_field(record, "question")),
        _answers(record),
        paragraphs,
    )


def _answers(record: Record) -> tuple[str, ...]:
    name, value = _field(record, "answer", "reasoned_answer")
    answer = _text(name, value, number=name == "answer")
    if name == "reasoned_answer":
        match = _REASONED.match(answer)
        if match is None:
            raise ValueError(
                f'reasoned_answer must end in "the answer is: ...", got ...{answer[-60:]!r}'
            )
        answer = match[1]
    aliases = [
        alias
        for name in ("aliases", "answer_aliases")
        if record.get(name) is not None
        for alias in _texts(name, record[name], number=True)
    ]
    return (answer, *aliases)


def _paragraph(record: Record) -> Paragraph:
    title = _optional_text(record, "title")
    name, value = _field(record, "sentences", "paragraph_text", "text")
    if name == "sentences":
        sentences = _texts(name, value, blank=True)  # HotpotQA has blank ones
    else:
        text = _text(name, value)
        sentences = tuple(text[start:end] for start, end in sentence_spans(text))
    return Paragraph(title, sentences, _supporting(record, title, len(sentences)))


def _supporting(record: Record, title: str, count: int) -> tuple[int, ...]:
    """The places of supporting sentences, which are all where the paragraph as such is marked."""
    name = "supporting" if "supporting" in record else "is_supporting"
    marked = record.get(name)
    if marked is None or isinstance(marked, bool):
        return tuple(range(count)) if marked else ()
    if not isinstance(marked, list):
        raise ValueError(
            f"{name} must be true, false or a list of places of sentences, got {marked!r:.60}"
        )
    for place in marked:
        if not is_whole(place) or not 0 <= place < count:
            raise ValueError(f"{title!r} has {count} sentences; supporting names {place!r:.60}")
    return tuple(marked)


def _context(record: Record) -> tuple[Paragraph, ...]:
    """The paragraphs of HotpotQA and 2WikiMultihopQA."""
    context = _pairs("context", record["context"], "title", "sentences", "content")
    if not context:
        raise ValueError("context holds no paragraphs")
    facts = _facts(record)
    paragraphs = []
    for place, (title, sentences) in enumerate(context):
        texts = _texts(f"the sentences of context[{place}]", sentences, blank=True)
        # The public files name some sentences that do not exist, which their evaluation ignores.
        supporting = {fact for name, fact in facts if name == title and fact < len(texts)}
        title = _text(f"the title of context[{place}]", title, blank=True)
        paragraphs.append(Paragraph(title, texts, tuple(sorted(supporting))))
    return tuple(paragraphs)


def _facts(record: Record) -> list[tuple[str, int]]:
    """The titles and places of supporting sentences; some titles are of no paragraph here."""
    if not _is_there(record, "supporting_facts"):
        return []
    name = "supporting_facts"
    return [
        (
            _text(f"the title of {name}[{place}]", title, blank=True),
            _whole(f"the sent_id of {name}[{place}]", sentence),
        )
        for place, (title, sentence) in enumerate(_pairs(name, record[name], "title", "sent_id"))
    ]


def _problem(record: Record, place: int) -> Problem:
    return Problem(
        _id(record, "math", place),
        _text(*_field(record, "problem")),
        _text(*_field(record, "answer"), number=True),
        _optional_text(record, "subject", "type"),
        _level(record),
    )


def _level(record: Record) -> int:
    level = record.get("level")
    if isinstance(level, str):
        level = re.sub(r"^level\s*", "", level.strip(), flags=re.IGNORECASE)
    # MATH has "Level ?" where nobody knows.
    return 0 if level in (None, "", "?") else _whole("level", level)


def _choice(record: Record, place: int) -> Choice:
    # A blank option is one all the same: what a letter stands for depends on those before.
    listed = _texts("options", _list(*_field(record, "options"), least=1), blank=True, number=True)
    if len(listed) > len(OPTION_LETTERS):
        raise ValueError(f"options must be at most {len(OPTION_LETTERS)}, got {len(listed)}")
    answer = _text(*_field(record, "answer"), blank=True, number=True).strip()
    if answer not in tuple(OPTION_LETTERS[: len(listed)]):
        raise ValueError(f"answer must be the letter of one of {len(listed)} options: {answer!r}")
    right = OPTION_LETTERS.index(answer)
    kept = [i for i, option in enumerate(listed) if option.strip() != "N/A" or i == right]
    return Choice(
        _id(record, "mmlu-pro", place),
        _text(*_field(record, "question")),
        tuple(listed[i] for i in kept),
        OPTION_LETTERS[kept.index(right)],
        _optional_text(record, "category"),
    )


def _conflict(record: Record, place: int) -> Conflict:
    names = ("prompt", "base_prompt", "subject", "context_answer", "memorised_answer")
    return Conflict(
        _id(record, "conflict", place), *(_text(*_field(record, name)) for name in names)
    )


def _talk(record: Record, place: int) -> RecordedTalk:
    name, listed = _field(record, "messages", "history")
    transcript = Transcript()
    for sender, text in _each(name, _list(name, listed, least=1), _said):
        transcript.append(sender, text)
    step = _whole(*_field(record, "mistake_step"))
    if step >= len(transcript):
        raise ValueError(f"mistake_step is {step}, but there are {len(transcript)} messages")
    agent = _text(*_field(record, "mistake_agent"))
    if not any(_names(agent, sender) for sender in transcript.senders):
        raise ValueError(
            f"mistake_agent must be one of {', '.join(transcript.senders)}; got {agent!r}"
        )
    return RecordedTalk(
        _id(record, "talk", place),
        _text(*_field(record, "question")),
        _text(*_field(record, "answer", "ground_truth"), number=True),
        transcript,
        agent,
        step,
    )


def _said(message: Record) -> tuple[str, str]:
    """Who wrote a message, and its text, which may be empty."""
    sender = _text(*_field(message, "sender", "name", "role"))
    return sender, _text(*_field(message, "text", "content"), blank=True)


def _names(agent: str, sender: str) -> bool:
    """Whether a name is a sender's, of whom Who&When also says to whom: "Boss (-> Worker)"."""
    return agent.strip().lower() in (sender.strip().lower(), sender.split(" (")[0].lower())
