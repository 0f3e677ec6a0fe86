"""Whether an answer is right, exactly as each benchmark says; what cannot be read is wrong."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from importlib.util import find_spec

from radar_core.evaluation import math_worker
from radar_core.evaluation.items import OPTION_LETTERS, Problem, Question

__all__ = ["choice", "exact_match", "f1", "final_answer", "math_correct"]

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_CLOSED = ("yes", "no", "noanswer")  # HotpotQA: these are right or wrong as a whole
_STATED = re.compile(r"answer(?:\s+is|\s*:)\s*:?\s*", re.IGNORECASE)
# With the word that makes math-verify prefer what follows.
_STATEMENT = re.compile(rf"(?:\bfinal\s+)?{_STATED.pattern}", re.IGNORECASE)
# Commands of LaTeX that say only how a text is set.
_SET = re.compile(
    r"\\(?:(?:text|math)(?:rm|bf|it|sf|tt|sc|up|md|normal)?|emph|mbox|hbox|underline"
    r"|operatorname\*?|boldsymbol)\s*\{"
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
        The content of the last \boxed{...}; else what follows the last "answer is" or "answer:" up
        to the end of its line; else the first line that is not blank. Without a full stop at its
        end, quotes or asterisks around it, and \text{...} and its like around any of it; "" if
        there is none.
    """
    answer = _boxed(text)
    if answer is None:
        stated = list(_STATED.finditer(text))
        rest = text[stated[-1].end() :] if stated else text
        answer = next((line for line in rest.splitlines() if line.strip(" *_`")), "")
    answer = _unset(answer).strip().strip(_AROUND)
    return answer[:-1].rstrip(_AROUND) if answer.endswith(".") else answer


def _unset(text: str) -> str:
    r"""Take the content out of every \text{...} and its like whose braces close."""
    for match in reversed(list(_SET.finditer(text))):  # so that inner ones come first
        end = _closing(text, match.end())
        if end is not None:
            text = text[: match.start()] + text[match.end() : end] + text[end + 1 :]
    return text


def _boxed(text: str) -> str | None:
    r"""The content of the last \boxed{...} whose braces close."""
    for match in reversed(list(re.finditer(r"\\boxed\s*\{", text))):
        end = _closing(text, match.end())
        if end is not None:
            return text[match.end() : end]
    return None


def _closing(text: str, start: int) -> int | None:
    """Where the brace closes that was opened just before a place."""
    depth = 1
    for place in range(start, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if depth == 0:
            return place
    return None


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
    stated = list(_STATEMENT.finditer(text))
    return text[stated[-1].start() :] if stated else text


def choice(prediction: str, num_options: int) -> str | None:
    """Read which option a reply chooses.

    The last statement counts, not the first as in MMLU-Pro's own evaluation: in a discussion the
    first is somebody else's. Nothing is guessed where MMLU-Pro draws at random.

    Args:
        prediction: the reply.
        num_options: how many options there are, at most 10.

    Returns:
        The letter in the last "answer is (X)" or "Answer: X", else the last letter of an option
        that stands alone; None if there is none.

    Raises:
        ValueError: there are more options than letters, or none.
    """
    if not 1 <= num_options <= len(OPTION_LETTERS):
        raise ValueError(f"num_options must be 1 to {len(OPTION_LETTERS)}, got {num_options}")
    letters = OPTION_LETTERS[:num_options]
    stated = re.findall(
        rf"[aA]nswer(?:\s+is|\s*:)\s*:?\s*[*(\[\s]*(?:\\boxed\{{)?([{letters}])(?![A-Za-z0-9])",
        prediction,
    )
    alone = re.findall(rf"(?<![A-Za-z0-9'])([{letters}])(?![A-Za-z0-9'])", prediction)
    found = stated or [letter for letter in alone if letter not in "AI"] or alone
    return found[-1] if found else None
