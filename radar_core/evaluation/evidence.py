"""Experiment 1: does steering move the model towards the evidence?

A question's paragraphs, gold and distracting, are reported by agents; the last agent is asked the
question. What counts is how probable the gold answer becomes when the evidence is anchored. The
conflict prompts ask the same of a single changed fact, against what the model has memorised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from radar_core.agent_radar import AgentRadar, Prompt
from radar_core.anchors import (
    Anchor,
    RenderedPrompt,
    anchor_mask,
    anchor_spans,
    render_chat,
    render_text,
)
from radar_core.evaluation import evidence_summary
from radar_core.evaluation.arms import UNSTEERED, Arm, arms, check_set
from radar_core.evaluation.conversation import SOLVER, Reported, report
from radar_core.evaluation.datasets import first_fields, load_conflicts, load_questions
from radar_core.evaluation.experiment import Row, Summary
from radar_core.evaluation.items import Conflict, Question
from radar_core.evaluation.metrics import f1
from radar_core.evaluation.options import names, whole_number, yes_or_no
from radar_core.evaluation.scoring import Scored, Scorer
from radar_core.evaluation.selectors import available_selectors
from radar_core.methods import NoSteering
from radar_core.relevance import Reading
from radar_core.relevance.selector import first_cache
from radar_core.steered import check_fits

if TYPE_CHECKING:
    from radar_core.evaluation.command import Arguments

__all__ = ["Evidence", "Gold", "build", "summarise"]

GOLD = "gold"
INSTRUCTION = (
    "You answer questions from what the others report. Reply with the answer alone, as short as "
    "can be: a name, a place, a date, a number, yes or no."
)
APPENDIX = "The sentences that matter most:"
OPTIONS = {
    "arms": "quick",
    "anchors": GOLD,
    "top_k": "5",
    "replies": "no",
    "reply_tokens": "16",
}

summarise = evidence_summary.summarise


@dataclass(frozen=True)
class Gold:
    """A selector that knows the evidence: 1 for a gold sentence, 0 for any other.

    Args:
        reported: the conversation, with its gold spans.
    """

    reported: Reported

    def similarities(self, reading: Reading) -> np.ndarray:
        """Tell gold sentences from others; see `radar_core.relevance.Selector.similarities`."""
        return np.array(
            [
                self.reported.is_gold(item.message_index, item.start, item.end)
                for item in reading.sentences
            ],
            dtype=np.float32,
        )


@dataclass(frozen=True)
class Evidence:
    """Compares ways of steering by what they make of the gold answer's probability.

    Args:
        model: a transformers causal language model in evaluation mode.
        tokenizer: its tokenizer, with a chat template.
        questions: questions with their paragraphs.
        conflicts: prompts that contradict what models have memorised.
        selectors: what chooses the anchors, by name; "gold", whose selector is not looked at,
            anchors the evidence itself.
        arm_set: "quick" or "all"; see `radar_core.evaluation.arms`.
        top_k: how many sentences a selector chooses.
        reply_tokens: length limit of the greedy replies, in tokens; 0 for none.
        seed: of intervals, tests and halves.
    """

    model: Any
    tokenizer: Any
    questions: Sequence[Question]
    conflicts: Sequence[Conflict]
    selectors: Mapping[str, Any]
    arm_set: str = "quick"
    top_k: int = 5
    reply_tokens: int = 0
    seed: int = 0
    name: ClassVar[str] = "evidence"

    @property
    def settings(self) -> dict[str, Any]:
        """What the results depend on, as JSON."""
        return {
            "arms": self.arm_set,
            "anchors": list(self.selectors),
            "top_k": self.top_k,
            "reply_tokens": self.reply_tokens,
            "instruction": INSTRUCTION,
            "appendix": APPENDIX,
        }

    def items(self) -> list[tuple[str, Question | Conflict]]:
        """Return every question and conflict with its name."""
        questions = [(f"{item.dataset}/{item.id}", item) for item in self.questions]
        return [*questions, *((f"conflict/{item.id}", item) for item in self.conflicts)]

    def measure(self, item: Question | Conflict) -> Iterator[dict[str, Any]]:
        """Score the answer under every arm.

        Args:
            item: a question or a conflict.

        Yields:
            A row for the unsteered model, then one for each arm: log-probabilities in nats, total
            and mean over the answer's tokens, and the share of attention on the anchors before and
            after.

        Raises:
            ValueError: evidence is to be anchored and the item marks none, or the prompt does not
                fit the model's context.
        """
        if isinstance(item, Conflict):
            return self._measure_conflict(item)
        return self._measure_question(item)

    def summarise(self, rows: Sequence[Row]) -> Summary:
        """Summarise rows; see `radar_core.evaluation.evidence_summary`."""
        return summarise(rows, seed=self.seed)

    # -- questions ---------------------------------------------------------------------------------

    def _measure_question(self, question: Question) -> Iterator[dict[str, Any]]:
        reported = report(question)
        answer = self._tokens(question.answers[0])
        prompts = {name: self._prompt(question, reported, name) for name in self.selectors}
        rendered = render_chat(self.tokenizer, next(iter(prompts.values())).messages)
        check_fits(self.model, len(rendered), max(len(answer), self.reply_tokens))
        scorer = Scorer(
            self.model,
            torch.tensor([rendered.input_ids]),
            cache=first_cache(
                (prompt.chosen.selector for prompt in prompts.values()),
                rendered.input_ids,
                self.model,
            ),
        )

        def row(name: str, scored: Scored, **more: Any) -> dict[str, Any]:
            (chances,) = scored.log_probabilities
            found = {
                "arm": name,
                "dataset": question.dataset,
                "log_probability": sum(chances),
                "mean_log_probability": sum(chances) / len(chances),
                "tokens": len(chances),
                "prompt_tokens": len(rendered),
                **more,
            }
            if self.reply_tokens:
                reply = self.tokenizer.decode(scored.reply, skip_special_tokens=True)
                found["f1"] = f1(reply.strip(), question)
            return found

        def scored(scorer: Scorer, arm: Arm, mask: Tensor | None) -> Scored:
            return scorer.score(arm.method, mask, [answer], self.reply_tokens)

        unsteered = Arm(UNSTEERED, NoSteering())
        yield row(UNSTEERED, scored(scorer, unsteered, None))
        for name, prompt in prompts.items():
            masks = [_mask(rendered, prompt.anchors[:-1]), _mask(rendered, prompt.anchors)]
            others = _mask(rendered, prompt.others)
            before = [scorer.score(NoSteering(), mask, [answer]).mass for mask in masks]
            for arm in arms(self.model, self.arm_set, question=True):
                about: dict[str, Any] = {
                    "anchors": name,
                    "label": arm.label,
                    "gold_found": _gold_found(reported, prompt),
                }
                if arm.appended:
                    found = scored(self._appended(prompt, question, scorer), arm, None)
                elif arm.others:
                    found = scored(scorer, arm, others)
                    about |= {"anchor_tokens": int(others.sum())}
                else:
                    mask = masks[arm.question]
                    found = scored(scorer, arm, mask)
                    about |= {
                        "mass_before": before[arm.question],
                        "mass": found.mass,
                        "anchor_tokens": int(mask.sum()),
                    }
                yield row(f"{name}: {arm.label}", found, **about)

    def _prompt(self, question: Question, reported: Reported, selector: str) -> Prompt:
        """Write the solver's prompt; its anchors are the chosen sentences, then the question."""
        if selector == GOLD:
            if not any(reported.gold):
                raise ValueError(
                    f"{question.dataset} marks no evidence here, so there is no gold to anchor; "
                    "choose anchors by --set anchors=dense"
                )
            chooses: dict[str, Any] = {"selector": Gold(reported), "threshold": 0.5}
        else:
            chooses = {"selector": self.selectors[selector], "top_k": self.top_k}
        radar = AgentRadar(reported.topology, spatial_decay=1.0, temporal_decay=1.0, **chooses)
        for message in reported.transcript:
            radar.observe(sender=message.sender, round=message.round, text=message.text)
        prompt = radar.prompt(receiver=SOLVER, query=question.question, system=INSTRUCTION)
        if not prompt.chosen.sentences:
            raise ValueError(f"no sentence was chosen by {selector!r}: {prompt.chosen.explanation}")
        return prompt

    def _appended(self, prompt: Prompt, question: Question, scorer: Scorer) -> Scorer:
        """Return the scorer of the prompt with the chosen sentences repeated before the task."""
        *before, last = prompt.messages
        task = f"Your task, {SOLVER}:\n{question.question}"
        assert last["content"].endswith(task)
        chosen = sorted(
            zip(prompt.anchors[:-1], prompt.chosen.sentences, strict=True),
            key=lambda pair: pair[0].start or 0,
        )
        lines = [APPENDIX, *(f"{sentence.sender}: {sentence.text}" for _, sentence in chosen)]
        content = last["content"].removesuffix(task) + "\n".join(lines) + f"\n\n{task}"
        rendered = render_chat(self.tokenizer, [*before, {**last, "content": content}])
        return Scorer(self.model, torch.tensor([rendered.input_ids]), scorer)

    # -- conflicts ---------------------------------------------------------------------------------

    def _measure_conflict(self, conflict: Conflict) -> Iterator[dict[str, Any]]:
        rendered = render_text(self.tokenizer, conflict.prompt)
        mask = _mask(rendered, [_fact(conflict)])
        answers = [self._tokens(conflict.context_answer), self._tokens(conflict.memorised_answer)]
        scorer = Scorer(self.model, torch.tensor([rendered.input_ids]))

        def row(arm: str, scored: Scored, **more: Any) -> dict[str, Any]:
            context, memorised = map(sum, scored.log_probabilities)
            return {
                "arm": arm,
                "dataset": "conflict",
                "log_probability": context,
                "memorised_log_probability": memorised,
                "margin": context - memorised,
                "context_wins": context > memorised,
                "mass": scored.mass,
                **more,
            }

        unsteered = scorer.score(NoSteering(), mask, answers)
        yield row(UNSTEERED, unsteered)
        for arm in arms(self.model, self.arm_set, question=False):
            about = {"anchors": GOLD, "label": arm.label, "mass_before": unsteered.mass}
            found = scorer.score(arm.method, mask, answers)
            yield row(f"{GOLD}: {arm.label}", found, **about)

    def _tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids


def build(arguments: Arguments) -> Evidence:
    """Build the experiment that the command line asks for.

    Args:
        arguments: with the options `arms` ("quick" or "all"), `anchors` (names of selectors, by
            commas), `top_k`, `replies` ("yes" or "no") and `reply_tokens`.

    Returns:
        The experiment.

    Raises:
        ValueError: no data is given, or an option is unknown or malformed.
    """
    options = arguments.options_over(OPTIONS)
    if not arguments.data:
        raise ValueError("--data: expected at least one file of questions or conflicts")
    questions: list[Question] = []
    conflicts: list[Conflict] = []
    for path in arguments.data:
        if "context_answer" in first_fields(path):
            conflicts += load_conflicts(path)[: arguments.limit]
        else:
            questions += load_questions(path)[: arguments.limit]
    # Of each kind there is one, whose work is then shared.
    selectors: dict[str, Callable[[], Any]] = {GOLD: lambda: None, **available_selectors(arguments)}
    anchors = names("anchors", options["anchors"], selectors)
    check_set(options["arms"])
    top_k = whole_number("top_k", options["top_k"])
    reply_tokens = whole_number("reply_tokens", options["reply_tokens"])
    replies = yes_or_no("replies", options["replies"])
    return Evidence(
        arguments.loaded.model,
        arguments.loaded.tokenizer,
        questions,
        conflicts,
        {name: selectors[name]() for name in anchors},
        options["arms"],
        top_k,
        reply_tokens * replies,
        arguments.seed,
    )


# -- steps -----------------------------------------------------------------------------------------


def _mask(rendered: RenderedPrompt, anchors: Sequence[Anchor]) -> Tensor:
    """Return which tokens of a prompt are anchored: bool [1, tokens]."""
    return torch.tensor([anchor_mask(rendered, anchor_spans(rendered, anchors))])


def _gold_found(reported: Reported, prompt: Prompt) -> float | None:
    """Return the share of the gold sentences that are chosen; None where none is gold."""
    gold = [
        item.selected
        for item in prompt.chosen.candidates
        if reported.is_gold(item.message_index, item.start, item.end)
    ]
    return sum(gold) / len(gold) if gold else None


def _fact(conflict: Conflict) -> Anchor:
    """Return where the changed fact stands in its prompt.

    Raises:
        ValueError: it does not stand there as stem and answer.
    """
    fact = conflict.base_prompt + conflict.context_answer
    start = conflict.prompt.find(fact)
    if start < 0:
        raise ValueError("the prompt does not hold its stem followed by the context's answer")
    return Anchor(0, start, start + len(fact))
