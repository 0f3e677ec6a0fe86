"""Whether an answer is right, exactly as each benchmark says; what cannot be read is wrong."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec

from radar_core.evaluation import math_worker
from radar_core.evaluation.items import OPTION_LETTERS, Problem, Question

__all__ = ["choice", "exact_match", "f1", "final_answer", "math_correct", "stated_answer"]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED = ("yes", "no", "noanswer")  # HotpotQA: these are right or wrong as a whole
# Where an answer is stated, with the word that makes math-verify prefer what follows: a heading
# "Final answer", a tag, or a sentence.
_STATED = re.compile(
    r"^[#*_` \t]*(?:final\s+)?answer[*_` \t\r]*\n\s*(?=\S)"
    r"|<answer>\s*"
    r"|(?:\bfinal\s+)?answer[*_`]*(?:\s+is\b|\s*:)\s*:?\s*",
    re.IGNORECASE | re.MULTILINE,
)
_TAG_END = re.compile(r"</answer>", re.IGNORECASE)
# Commands of LaTeX that say only how a text is set.
_SET = re.compile(
    r"\\(?:(?:text|math)(?:rm|bf|it|sf|tt|sc|up|md|normal)?|emph|mbox|hbox|underline"
    r"|operatorname\*?|boldsymbol)\s*\{"
)
# What may stand around the letter of an option: blanks, markup, quotes, brackets and LaTeX.
_MARKS = r"""(?:[\s*_`"'“”‘’$()\[\]{}]|\\[()\[\]]|\\(?:text|math)[a-z]*)*"""
_BEFORE = rf"{_MARKS}(?:(?i:the|thus|therefore|option|choice|letter)\b{_MARKS})*"
_LETTER = r"(?!I[ \t]+(?!is\b)[a-z])([A-J])(?![A-Za-z0-9]|['’][a-z])"  # not a pronoun
# The forms in which a reply says what it chooses.
_CHOSEN = tuple(
    re.compile(form, re.MULTILINE)
    for form in (
        r"(?i:(?:answer|(?:correct|right|best|final|my)\s+(?:option|choice))(?:\s+(?:option|choice))?"
        r"""[*_`"']*(?:\s+(?:is|must\s+be|should\s+be)\b|\s*[:=]|\s+[-–—](?=\s))\s*:?)"""
        rf"{_BEFORE}{_LETTER}",
        rf"^[#*_` \t]*(?i:(?:final\s+)?answer)[*_` \t\r]*\n{_BEFORE}{_LETTER}",
        rf"(?i:<answer>){_BEFORE}{_LETTER}",
        # With its label or alone: not the F of a formula.
        rf"\\boxed\s*\{{{_BEFORE}{_LETTER}(?=\s*[)\]}}.:*$\\])(?!{_MARKS}[=<>+])",
        rf"(?i:\bnot\b){_BEFORE}[A-J]\b{_MARKS}[.,;]?\s*(?i:but(?:\s+rather)?|it\s+is|it['’]s)\b"
        rf"{_BEFORE}{_LETTER}",
        rf"(?<![A-Za-z0-9'’]){_LETTER}{_MARKS}"
        r"(?i:is\s+the\s+(?:(?:correct|right)\s+(?:answer|option|choice)|answer)\b)",
    )
)
# A letter of an option elsewhere; not the article that begins a sentence, the end of "N/A", what is
# primed, or what is said not to be it.
_ALONE = re.compile(
    r"(?<![A-Za-z0-9])(?<![A-Za-z]['’])(?<!N/)(?<![Nn]ot )(?<![Nn]ot \()"
    r"(?!A(?<![a-z,;:] A)[ \t]+(?!(?:is|was|seems|looks|would|because|since|as|and|or|but)\b)[a-z])"
    rf"{_LETTER}(?:(?!['’])|(?<=['‘].))"
)
_AROUND = "*_`\"'“” "


def f1(prediction: str, question: Question) -> float:
    """Compare an answer with a question's right ones, token by token.

    HotpotQA (hotpot_evaluate_v1.py) and 2WikiMultihopQA: lower case, without punctuation and
    articles; 0 if either side is yes, no or noanswer and they differ; else F1 of the two bags of
    tokens. MuSiQue (metrics/answer.py): without the rule for yes and no, and two empty answers
    agree. The best of the answer and its aliases counts (HotpotQA has none).

    Args:
        prediction: the answer alone; see `final_answer`.
        question: what was asked.

    Returns:
        0 to 1.
    """
    compare = _musique_f1 if question.dataset == "musique" else _hotpot_f1
    return _best(compare, prediction, question)


def exact_match(prediction: str, question: Question) -> float:
    """Compare an answer with a question's right ones as a whole, normalised as in `f1`.

    Args:
        prediction: the answer alone.
        question: what was asked.

    Returns:
        1 if it equals the answer or an alias, else 0.
    """
    return _best(
        lambda one, other: float(_normalise(one) == _normalise(other)), prediction, question
    )


def _best(compare: Callable[[str, str], float], prediction: str, question: Question) -> float:
    return max(compare(prediction, answer) for answer in question.answers)


def _normalise(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _hotpot_f1(prediction: str, answer: str) -> float:
    one, other = _normalise(prediction), _normalise(answer)
    if one != other and (one in _CLOSED or other in _CLOSED):
        return 0.0
    return _overlap(one.split(), other.split())


def _musique_f1(prediction: str, answer: str) -> float:
    one, other = _normalise(prediction).split(), _normalise(answer).split()
    return float(one == other) if not one or not other else _overlap(one, other)


def _overlap(one: list[str], other: list[str]) -> float:
    shared = sum((Counter(one) & Counter(other)).values())
    return 2 * shared / (len(one) + len(other)) if shared else 0.0


def final_answer(text: str) -> str:
    r"""Take the short answer out of a reply.

    Args:
        text: a reply, with or without reasoning.

    Returns:
        The content of the last \boxed{...}; else what follows the last "answer is", "answer:",
        heading "Answer" or <answer>, up to the end of its line; else the first line that is not
        blank. Without a full stop at its end, quotes or asterisks around it, and \text{...} and its
        like around any of it; "" if there is none.
    """
    stated = stated_answer(text)
    return _bare(_first_line(text)) if stated is None else stated


def stated_answer(text: str) -> str | None:
    """Take the short answer out of a reply that says that it is the answer.

    Args:
        text: a reply, with or without reasoning.

    Returns:
        As `final_answer`, but None if nothing is said to be the answer.
    """
    boxed = _boxed(text)
    if boxed is not None:
        return _bare(boxed)
    stated = list(_STATED.finditer(text))
    if not stated:
        return None
    return _bare(_first_line(_TAG_END.split(text[stated[-1].end() :], maxsplit=1)[0]))


def _first_line(text: str) -> str:
    """The first line that is not blank."""
    return next((line for line in text.splitlines() if line.strip(" *_`")), "")


def _bare(answer: str) -> str:
    """An answer without how it is set, what stands around it and a full stop."""
    answer = _unset(answer).strip().strip(_AROUND)
    return answer[:-1].rstrip(_AROUND) if answer.endswith(".") else answer


def _unset(text: str) -> str:
    r"""Take the content out of every \text{...} and its like whose braces close."""
    closing = _closing_braces(text)
    cut: list[tuple[int, int]] = []
    for match in _SET.finditer(text):
        end = closing.get(match.end() - 1)
        if end is not None:
            cut += [match.span(), (end, end + 1)]
    kept, start = [], 0
    for first, last in sorted(cut):
        kept.append(text[start:first])
        start = last
    return "".join(kept) + text[start:]


def _boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces close."""
    closing = _closing_braces(text)
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        end = closing.get(match.end() - 1)
        if end is not None:
            return text[match.end() : end]
    return None


def _closing_braces(text: str) -> dict[int, int]:
    """Where each brace that is opened closes again, by its place, if it does."""
    opened: list[int] = []
    closing: dict[int, int] = {}
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            closing[opened.pop()] = brace.start()
    return closing


def math_correct(prediction: str, problem: Problem) -> bool | None:
    """Compare a solution's answer with a problem's, as mathematics, by math-verify.

    Args:
        prediction: the solution; its last boxed or stated answer counts, read from its statement
            on as math-verify reads a whole text.
        problem: what was asked.

    Returns:
        Whether they are equal; None if no answer was found, which counts as wrong, as does what
        cannot be compared within a few seconds.

    Raises:
        ImportError: if math-verify is not installed.
        RuntimeError: if the process that compares cannot be started.
    """
    if find_spec("math_verify") is None:
        raise ImportError(
            'comparing mathematics needs math-verify; run: pip install "radar-kernels[eval]"'
        )
    said = math_worker.equal(_last_statement(prediction), problem.answer)
    if said is None:  # "so the answer is found": it stands elsewhere
        return math_worker.equal(prediction, problem.answer)
    return said


def _last_statement(text: str) -> str:
    """Cut what comes before the last answer, of which math-verify would take the first."""
    boxed = _boxed(text)
    if boxed is not None:
        return f"$\\boxed{{{boxed}}}$"
    stated = list(_STATED.finditer(text))
    if not stated:
        return text
    tagged = stated[-1][0].startswith("<")  # which math-verify would take for "less than"
    start = stated[-1].end() if tagged else stated[-1].start()
    return _TAG_END.split(text[start:], maxsplit=1)[0]


def choice(prediction: str, num_options: int) -> str | None:
    r"""Read which option a reply chooses.

    The last statement counts, not the first as in MMLU-Pro's own evaluation: in a discussion the
    first is somebody else's. Nothing is guessed where MMLU-Pro draws at random.

    Args:
        prediction: the reply.
        num_options: how many options there are, at most 10.

    Returns:
        The letter in the last statement, such as "answer is (X)", "Answer: X", \boxed{X}, "not Y
        but X" or "X is the answer"; else the last letter of an option that stands alone, except an
        "A" or "I" that is a word; None if there is none.

    Raises:
        ValueError: there are more options than letters, or none.
    """
    if not 1 <= num_options <= len(OPTION_LETTERS):
        raise ValueError(f"num_options must be 1 to {len(OPTION_LETTERS)}, got {num_options}")
    letters = OPTION_LETTERS[:num_options]
    found = [match for form in _CHOSEN for match in form.finditer(prediction)]
    found.sort(key=lambda match: match.start(1))
    stated = [match[1] for match in found if match[1] in letters]
    alone = [letter for letter in _ALONE.findall(prediction) if letter in letters]
    chosen = stated or [letter for letter in alone if letter not in "AI"] or alone
    return chosen[-1] if chosen else None
