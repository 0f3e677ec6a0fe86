"""What the data sets hold, one class a kind of item."""

from __future__ import annotations

from dataclasses import dataclass

from radar_core.transcript import Transcript

__all__ = [
    "OPTION_LETTERS",
    "Choice",
    "Conflict",
    "Paragraph",
    "Problem",
    "Question",
    "RecordedTalk",
]

OPTION_LETTERS = "ABCDEFGHIJ"  # as many as MMLU-Pro has options


@dataclass(frozen=True)
class Paragraph:
    """A paragraph that a question comes with.

    Args:
        title: of the article it is from.
        sentences: its text, in sentences where the data set has them, else as one.
        supporting: indices of the sentences that the answer rests on; where the data set marks
            whole paragraphs, all of a marked one.
    """

    title: str
    sentences: tuple[str, ...]
    supporting: tuple[int, ...] = ()


@dataclass(frozen=True)
class Question:
    """A question over several paragraphs (HotpotQA, MuSiQue, 2WikiMultihopQA).

    Args:
        id: differs from every other item's.
        dataset: "hotpotqa", "musique" or "2wiki": answers are compared as that benchmark does.
        question: the question.
        answers: the right answer, then its aliases.
        paragraphs: gold and distracting ones, in the data set's order.
    """

    id: str
    dataset: str
    question: str
    answers: tuple[str, ...]
    paragraphs: tuple[Paragraph, ...]


@dataclass(frozen=True)
class Problem:
    """A problem of mathematics (MATH-500).

    Args:
        id: differs from every other item's.
        problem: the text, with LaTeX.
        answer: the right answer, in LaTeX.
        subject: such as "Algebra".
        level: 1 to 5.
    """

    id: str
    problem: str
    answer: str
    subject: str = ""
    level: int = 0


@dataclass(frozen=True)
class Choice:
    """A question with options (MMLU-Pro).

    Args:
        id: differs from every other item's.
        question: the question.
        options: the options, in order, at most 10; the first is "A".
        answer: the letter of the right one.
        category: such as "physics".
    """

    id: str
    question: str
    options: tuple[str, ...]
    answer: str
    category: str = ""


@dataclass(frozen=True)
class Conflict:
    """A prompt whose text contradicts what models have memorised (CounterFact).

    Args:
        id: differs from every other item's.
        prompt: "Redefine: ", the changed fact, and the stem to complete.
        base_prompt: the stem alone.
        subject: what the fact is about.
        context_answer: what the prompt says.
        memorised_answer: what the model knows.
    """

    id: str
    prompt: str
    base_prompt: str
    subject: str
    context_answer: str
    memorised_answer: str


@dataclass(frozen=True)
class RecordedTalk:
    """A conversation of agents that failed at a task (Who&When).

    Args:
        id: differs from every other item's.
        question: the task.
        answer: the right answer.
        transcript: what the agents said.
        mistake_agent: who made the mistake.
        mistake_step: index of the message with it.
    """

    id: str
    question: str
    answer: str
    transcript: Transcript
    mistake_agent: str
    mistake_step: int
