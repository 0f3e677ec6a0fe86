"""Loaders of the data sets: Radar's own JSON lines and each benchmark's public format."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from radar_core.checks import is_whole
from radar_core.evaluation.items import (
    Choice,
    Conflict,
    Paragraph,
    Problem,
    Question,
    RecordedTalk,
)
from radar_core.relevance import sentence_spans
from radar_core.transcript import Transcript

__all__ = ["load_choices", "load_conflicts", "load_problems", "load_questions", "load_talks"]

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
_REASONED = re.compile(r".*\banswer is:?\s*(.+?)\.?\s*$", re.DOTALL | re.IGNORECASE)
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


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
        ValueError: with file and place, if something in it is unusable.
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


# ---- records -------------------------------------------------------------------------------------


def _load(source: Source, build: Callable[[Record, int], Item]) -> list[Item]:
    items: list[Item] = []
    places: dict[str, str] = {}
    for number, (where, record) in enumerate(_records(source)):
        try:
            item = build(record, number)
        except KeyError as error:
            fields = ", ".join(sorted(record))
            looks = "".join(f"; {said}" for name, said in _LOOKS.items() if name in record)
            raise ValueError(
                f"{where}: the field {error} is missing; got {fields}{looks}"
            ) from None
        except (AttributeError, IndexError, TypeError, ValueError) as error:
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
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8: {error.reason}") from None
    whole = _whole(text)
    if whole is not None:
        for number, record in enumerate(whole):
            yield _checked(f"{path}, item {number}", record)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        yield _checked(f"{path}:{number}", record)


def _whole(text: str) -> list[Any] | None:
    """The records of a file that is one JSON value; None for JSON lines."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    return value if isinstance(value, list) else [value]


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


# ---- items ---------------------------------------------------------------------------------------


def _text(record: Record, *names: str) -> str:
    """The first of several fields that is there; the last name is required."""
    name = next((name for name in names if name in record), names[-1])
    value = record[name]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{name} must be text, got {type(value).__name__}")
    return str(value)


def _id(record: Record, prefix: str, place: int) -> str:
    for name in ("id", "_id", "unique_id", "question_id", "question_ID"):
        if record.get(name) not in (None, ""):
            return str(record[name])
    return f"{prefix}-{place}"


def _question(record: Record, place: int, dataset: str | None) -> Question:
    if "context" in record:
        kind, paragraphs = "hotpotqa", _context(record)
        # Only 2WikiMultihopQA has the chain of facts that leads to the answer.
        kind = "2wiki" if "evidences" in record or "evidences_id" in record else kind
    else:
        listed = _list(record, "paragraphs")
        paragraphs = tuple(_paragraph(paragraph) for paragraph in listed)
        kind = "musique" if "text" in listed[0] or "paragraph_text" in listed[0] else "hotpotqa"
        kind = "2wiki" if "reasoned_answer" in record else kind
    return Question(
        _id(record, dataset or kind, place),
        dataset or kind,
        _text(record, "question"),
        _answers(record),
        paragraphs,
    )


def _answers(record: Record) -> tuple[str, ...]:
    if "answer" in record:
        answer = _text(record, "answer")
    else:
        match = _REASONED.match(_text(record, "reasoned_answer"))
        if match is None:
            raise ValueError('reasoned_answer must end in "the answer is: ..."')
        answer = match[1]
    aliases = record.get("aliases") or record.get("answer_aliases") or ()
    return (answer, *(str(alias) for alias in aliases))


def _list(record: Record, name: str) -> list[Any]:
    value = record[name]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list of at least one, got {type(value).__name__}")
    return value


def _paragraph(record: Record) -> Paragraph:
    title = str(record.get("title") or "")
    marked = record.get("supporting", record.get("is_supporting"))
    if "sentences" in record:
        sentences = tuple(str(sentence) for sentence in record["sentences"])
    else:
        text = _text(record, "paragraph_text", "text")
        sentences = tuple(text[start:end] for start, end in sentence_spans(text))
    if isinstance(marked, list):
        _check_places(marked, len(sentences), title)
        return Paragraph(title, sentences, tuple(marked))
    return Paragraph(title, sentences, tuple(range(len(sentences))) if marked else ())


def _check_places(marked: list[Any], count: int, title: str) -> None:
    for place in marked:
        if not is_whole(place) or not 0 <= place < count:
            raise ValueError(f"{title!r} has {count} sentences; supporting names {place!r}")


def _context(record: Record) -> tuple[Paragraph, ...]:
    """The paragraphs of HotpotQA and 2WikiMultihopQA: pairs, or the hub's dict of two lists."""
    context, facts = record["context"], record.get("supporting_facts") or []
    if isinstance(context, dict):
        texts = context.get("sentences") or context["content"]
        context = list(zip(context["title"], texts, strict=True))
    if isinstance(facts, dict):
        facts = list(zip(facts["title"], facts["sent_id"], strict=True))
    if not context:
        raise ValueError("context holds no paragraphs")
    # The public files name a few sentences that do not exist; their own evaluation ignores them.
    return tuple(
        Paragraph(
            title,
            tuple(sentences),
            tuple(sorted({i for name, i in facts if name == title and i < len(sentences)})),
        )
        for title, sentences in context
    )


def _problem(record: Record, place: int) -> Problem:
    return Problem(
        _id(record, "math", place),
        _text(record, "problem"),
        _text(record, "answer"),
        str(record.get("subject") or record.get("type") or ""),
        int(re.sub(r"\D", "", str(record.get("level") or "")) or 0),
    )


def _choice(record: Record, place: int) -> Choice:
    listed = [str(option) for option in _list(record, "options")]
    answer = _text(record, "answer").strip()
    if answer not in _LETTERS[: len(listed)]:
        raise ValueError(f"answer must be the letter of one of {len(listed)} options: {answer!r}")
    right = _LETTERS.index(answer)
    kept = [i for i, option in enumerate(listed) if option.strip() != "N/A" or i == right]
    return Choice(
        _id(record, "mmlu-pro", place),
        _text(record, "question"),
        tuple(listed[i] for i in kept),
        _LETTERS[kept.index(right)],
        str(record.get("category") or ""),
    )


def _conflict(record: Record, place: int) -> Conflict:
    names = ("prompt", "base_prompt", "subject", "context_answer", "memorised_answer")
    return Conflict(_id(record, "conflict", place), *(_text(record, name) for name in names))


def _talk(record: Record, place: int) -> RecordedTalk:
    transcript = Transcript()
    messages = record["messages"] if "messages" in record else record["history"]
    for message in messages:
        sender = message.get("sender") or message.get("name") or message["role"]
        transcript.append(sender, message["text"] if "text" in message else message["content"])
    step = int(record["mistake_step"])
    if not 0 <= step < len(transcript):
        raise ValueError(f"mistake_step is {step}, but there are {len(transcript)} messages")
    return RecordedTalk(
        _id(record, "talk", place),
        _text(record, "question"),
        _text(record, "answer", "ground_truth"),
        transcript,
        _text(record, "mistake_agent"),
        step,
    )
