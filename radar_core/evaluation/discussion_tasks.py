"""An item of a data set as a task of a discussion: its text, who knows what, and its score."""

from __future__ import annotations

import re
from collections.abc import Sequence

from radar_core.discussion.task import Task
from radar_core.evaluation.items import Choice, Paragraph, Problem, Question
from radar_core.evaluation.metrics import choice, f1, final_answer, math_correct, stated_answer

__all__ = ["Item", "dataset_of", "form", "parse_answer", "score", "task_for", "work"]

Item = Question | Problem | Choice

# Beyond these a voter's answer and another's are the same.
_NO_DIFFERENCE = re.compile(r"\b(?:a|an|the)\b|[^\w\s]")


def dataset_of(item: Item) -> str:
    """Return the name of the data set that an item is from."""
    if isinstance(item, Question):
        return item.dataset
    return "math-500" if isinstance(item, Problem) else "mmlu-pro"


def task_for(item: Item, agents: Sequence[str], shared: bool = False) -> Task:
    """Write an item as a task.

    A question's paragraphs are dealt out, one by one, as the agents' private notes, so that they
    have to talk. Problems and choices come without notes.

    Args:
        item: the item.
        agents: the agents' names.
        shared: every agent has all paragraphs instead.

    Returns:
        The task; its id is the data set's name and the item's.
    """
    name = f"{dataset_of(item)}/{item.id}"
    if isinstance(item, Problem):
        return Task(item.problem, id=name)
    if isinstance(item, Choice):
        options = "\n".join(
            f"{chr(ord('A') + place)}. {option}" for place, option in enumerate(item.options)
        )
        return Task(f"{item.question}\n{options}", id=name)
    notes = {
        agent: "\n\n".join(
            _note(paragraph)
            for index, paragraph in enumerate(item.paragraphs)
            if shared or index % len(agents) == place
        )
        for place, agent in enumerate(agents)
    }
    return Task(item.question, notes, id=name)


def work(item: Item) -> str:
    """Return what an agent is asked to do with an item."""
    if isinstance(item, Question):
        return (
            "In at most three sentences, say what your notes and the others' messages tell about "
            f"this. {form(item)}"
        )
    return f"Reason in a few short steps, and correct the others where they are wrong. {form(item)}"


def form(item: Item) -> str:
    """Return in what form an item's answer is to be given."""
    if isinstance(item, Question):
        return (
            "End with a line 'Answer: ...' that holds the answer alone, as short as can be: a "
            "name, a place, a date, a number, yes or no."
        )
    if isinstance(item, Problem):
        return "End with the result as \\boxed{result}."
    return "End with 'The answer is (X)', where X is the letter of the right option."


def parse_answer(item: Item, text: str) -> str | None:
    """Find the answer in a text, in a form in which voters' equal answers are equal.

    Args:
        item: what was asked.
        text: what was said.

    Returns:
        The letter of a choice, else `stated_answer`: of a problem without blanks, of a question in
        small letters and without articles and punctuation. None if no answer is stated.
    """
    if isinstance(item, Choice):
        return choice(text, len(item.options))
    answer = stated_answer(text)
    if answer is None:
        return None
    if isinstance(item, Problem):
        return "".join(answer.split()) or None
    return " ".join(_NO_DIFFERENCE.sub(" ", answer.lower()).split()) or None


def score(item: Item, text: str | None) -> float:
    """Score a decision.

    Args:
        item: what was asked.
        text: the whole text of the decision; None if there is none, which scores 0.

    Returns:
        F1 of a question's `final_answer`; for the others 1 if it is right, else 0, also where no
        answer is found.
    """
    if text is None:
        return 0.0
    if isinstance(item, Question):
        return f1(final_answer(text), item)
    if isinstance(item, Problem):
        return float(math_correct(text, item) is True)
    return float(choice(text, len(item.options)) == item.answer)


def _note(paragraph: Paragraph) -> str:
    sentences = " ".join(sentence.strip() for sentence in paragraph.sentences)
    return f"{paragraph.title}: {sentences}"
