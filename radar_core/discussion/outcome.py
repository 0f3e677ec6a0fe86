"""What came of a discussion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from radar_core.discussion.model import Answer
from radar_core.discussion.task import Task
from radar_core.transcript import Message, Transcript

__all__ = ["Outcome", "Spoken", "Verdict"]


@dataclass(frozen=True)
class Spoken:
    """What an agent said, and what it took.

    Args:
        agent: name of the agent.
        round: its round; the decider's is one more than the last.
        answer: the model's answer.
        policy_seconds: time that its policy took, model calls left out.
        policy_calls: what the model answered to the policy's own prompts.
        from_log: whether all of it was in the log already.
    """

    agent: str
    round: int
    answer: Answer
    policy_seconds: float = 0.0
    policy_calls: tuple[Answer, ...] = ()
    from_log: bool = False

    @property
    def text(self) -> str:
        """What was said."""
        return self.answer.text

    @property
    def answers(self) -> tuple[Answer, ...]:
        """All that the model answered, for the policy and for the agent."""
        return (*self.policy_calls, self.answer)


@dataclass(frozen=True)
class Verdict:
    """The decision at the end of a discussion.

    Args:
        text: the whole text of the decision; None if there is none.
        answer: the answer in it: the parsed one where answers were parsed, else the whole text;
            None if nothing could be parsed.
        votes: how many agents gave each answer, the most frequent first; empty without a vote.
        unparsed: how many agents gave no answer that could be parsed.
        spoken: what the decider said; None if nobody was asked.
    """

    text: str | None
    answer: str | None
    votes: Mapping[str, int] = field(default_factory=dict)
    unparsed: int = 0
    spoken: Spoken | None = None


@dataclass(frozen=True)
class Outcome:
    """A discussion that has come to its end.

    Args:
        task: what it was about.
        messages: what was said, in the order in which it is read.
        verdict: the decision.
        seconds: wall time of this process, so without what was in the log already.
    """

    task: Task
    messages: tuple[Spoken, ...]
    verdict: Verdict
    seconds: float

    @property
    def answer(self) -> str | None:
        """The answer that was decided on; None if there is none."""
        return self.verdict.answer

    @property
    def transcript(self) -> Transcript:
        """What was said, without the decider."""
        return Transcript(Message(said.agent, said.round, said.text) for said in self.messages)

    @property
    def spoken(self) -> tuple[Spoken, ...]:
        """What was said, with the decider."""
        decider = self.verdict.spoken
        return self.messages if decider is None else (*self.messages, decider)

    @property
    def calls(self) -> int:
        """How many answers of the model it took, those of policies included."""
        return sum(len(said.answers) for said in self.spoken)

    @property
    def prompt_tokens(self) -> int:
        """The length of all prompts, those of policies included."""
        return sum(answer.prompt_tokens for said in self.spoken for answer in said.answers)

    @property
    def completion_tokens(self) -> int:
        """The length of all answers, those to policies included."""
        return sum(answer.completion_tokens for said in self.spoken for answer in said.answers)

    @property
    def policy_seconds(self) -> float:
        """Time that policies took, model calls left out."""
        return sum(said.policy_seconds for said in self.spoken)
