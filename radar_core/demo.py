"""A small real discussion between agents, and its last question answered with and without steering.

Every message is what the model says. The host's first note holds the figure that the question asks
for; whether the model passes it on is checked and reported, not assumed.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers.generation import BaseStreamer

from radar_core.agent_radar import AgentRadar, Chosen, Prompt
from radar_core.methods import SPA, AttentionBias, Method
from radar_core.relevance import Relevance
from radar_core.steered import Steered, attention_mass
from radar_core.topology import Topology
from radar_core.transcript import Message, Transcript

__all__ = ["STEPS", "Demonstration", "Outcome", "answer_probability", "run"]

ROUNDS = 2
LAYERS = [["treasurer", "host", "mechanic"], ["planner", "critic"], ["speaker"]]
NOTES = {
    "treasurer": [
        "The budget limit for the workshop is 4,250 dollars.",
        "All receipts must be handed in by the end of June.",
    ],
    "host": [
        "The hall is free on Saturday 14 June, and renting it costs 900 dollars.",
        "Lunch for the volunteers costs 780 dollars.",
    ],
    "mechanic": [
        "The spare parts cost 1,350 dollars, and each repair takes 40 minutes.",
        "We need 12 repair stands, and renting them costs 640 dollars.",
    ],
}
TASKS = {
    "planner": "Write what the team should do next, in two sentences.",
    "critic": "Write what could go wrong, in two sentences.",
}
QUESTION = "What does it cost to rent the hall?"
ANSWER_STEM = "Renting the hall costs"
ANSWER = " 900 dollars"
FIGURE = "900"
FALLBACK_TOP_K = 3
MESSAGE_TOKENS = 64
TIMED_TOKENS = 16
REPEATS = 5
UNSTEERED = "unsteered"
OFF = SPA(1.0)  # the identity: nothing is hooked, the model runs as it is

MESSAGES = ROUNDS * sum(len(layer) for layer in LAYERS[:-1])
METHODS = 3
STEPS = MESSAGES + 1 + METHODS * 2 + REPEATS

Announce = Callable[[str], None]


@dataclass(frozen=True)
class Outcome:
    """What one way of answering gave.

    Args:
        name: of the method, with its parameters.
        reply: the greedy reply.
        correct: whether the reply states the figure.
        mass: share of the last prompt token's attention that the anchors get, mean over all layers
            and heads, 0 to 1. SPA blends the outputs of two branches and leaves it as it is.
        probability: of the right answer after the stem, see :func:`answer_probability`.
        prefill_ms: median time to the first token, in milliseconds.
        token_ms: median time of a further token, in milliseconds.
        prefill_ratio: prefill_ms over that of the unsteered model.
        token_ratio: token_ms over that of the unsteered model.
    """

    name: str
    reply: str
    correct: bool
    mass: float
    probability: float
    prefill_ms: float
    token_ms: float
    prefill_ratio: float
    token_ratio: float


@dataclass(frozen=True)
class Demonstration:
    """Everything the demo found out.

    Args:
        topology: who talks to whom.
        transcript: the discussion, as the model led it.
        chosen: the sentences that Agent-Radar chose for the last agent.
        by_rank: whether no sentence passed the threshold, so that the best few were taken instead.
        stated_by: the first message that states the figure, None if the model never passed it on.
        prompt_tokens: length of the last agent's prompt.
        anchor_tokens: how many of them are anchored.
        outcomes: unsteered first, then each method.
        scatter: the 90th over the 10th percentile of the unsteered model's steps; much above 1, the
            machine was busy.
    """

    topology: Topology
    transcript: Transcript
    chosen: Chosen
    by_rank: bool
    stated_by: Message | None
    prompt_tokens: int
    anchor_tokens: int
    outcomes: list[Outcome]
    scatter: float = 1.0


def run(
    model: Any,
    tokenizer: Any,
    encoder: Any,
    *,
    seed: int | None = None,
    max_new_tokens: int = 48,
    announce: Announce = lambda step: None,
) -> Demonstration:
    """Hold the discussion, then answer its question unsteered and with two methods.

    Args:
        model: a transformers causal language model in evaluation mode that plays all agents.
        tokenizer: its tokenizer, with a chat template.
        encoder: what :class:`radar_core.Relevance` takes; None is the embedded encoder.
        seed: draws the discussion with this seed (temperature 0.7); None leads it greedily. The
            replies are greedy either way.
        max_new_tokens: length limit of each reply, in tokens.
        announce: called :data:`STEPS` times, before each step, with what it is.

    Returns:
        The discussion, the selection and what each method gave.

    Raises:
        ValueError: a value is out of range, or the model cannot be steered.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    relevance = encoder if isinstance(encoder, Relevance) else Relevance(encoder)
    topology = Topology.layered(LAYERS)
    transcript = _discuss(model, tokenizer, topology, relevance, seed, announce)
    announce("choosing sentences for the speaker")
    prompt, by_rank = _prompt(topology, relevance, transcript)
    outcomes, scatter = _answers(model, tokenizer, prompt, max_new_tokens, announce)
    inputs = _inputs(model, tokenizer, prompt)
    return Demonstration(
        topology,
        transcript,
        prompt.chosen,
        by_rank,
        next((message for message in transcript if states_figure(message.text)), None),
        inputs["input_ids"].shape[1],
        int(inputs["anchors"].sum()),
        outcomes,
        scatter,
    )


def states_figure(text: str) -> bool:
    """Whether a text holds the figure that is asked for, however its thousands are set apart."""
    plain = re.sub(r"(?<=\d)[,.'\s](?=\d{3}(?!\d))", "", text)
    return re.search(rf"(?<!\d){FIGURE}(?!\d)", plain) is not None


def _discuss(
    model: Any,
    tokenizer: Any,
    topology: Topology,
    relevance: Relevance,
    seed: int | None,
    announce: Announce,
) -> Transcript:
    speak = Steered(model, tokenizer, OFF)
    how = {"do_sample": False} if seed is None else {"do_sample": True, "temperature": 0.7}
    radar = AgentRadar(topology, relevance)
    if seed is not None:
        torch.manual_seed(seed)
    for round in range(1, ROUNDS + 1):
        for agent in (agent for layer in LAYERS[:-1] for agent in layer):
            announce(f"round {round}: {agent} speaks")
            if agent in NOTES:
                note = NOTES[agent][round - 1]
                content = f"Rewrite this note as a short message to your team: {note}"
                messages = [{"role": "user", "content": content}]
            else:
                messages = radar.prompt(receiver=agent, query=TASKS[agent], round=round).messages
            reply = speak.chat(messages, anchors=(), max_new_tokens=MESSAGE_TOKENS, **how)
            radar.observe(sender=agent, round=round, text=reply.text.strip())
    return radar.transcript


def _prompt(
    topology: Topology, relevance: Relevance, transcript: Transcript
) -> tuple[Prompt, bool]:
    """Build the last agent's prompt; where nothing passes the threshold, take the best few."""
    for top_k in (None, FALLBACK_TOP_K):
        radar = AgentRadar(topology, relevance, top_k=top_k)
        for message in transcript:
            radar.observe(sender=message.sender, round=message.round, text=message.text)
        prompt = radar.prompt(receiver=LAYERS[-1][0], query=QUESTION)
        if len(prompt.chosen):
            break
    return prompt, top_k is not None


def _inputs(model: Any, tokenizer: Any, prompt: Prompt) -> dict[str, Tensor]:
    return Steered(model, tokenizer).prepare([prompt.messages], [prompt.anchors])


def _methods(model: Any) -> dict[str, Method]:
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    upper = range(layers - layers // 3, layers)
    return {
        UNSTEERED: OFF,
        "SPA, strength 1.4": SPA(1.4),
        f"attention bias 2, layers {upper.start}-{upper.stop - 1}, answer only": AttentionBias(
            2.0, layers=list(upper), queries="generated"
        ),
    }


def _answers(
    model: Any, tokenizer: Any, prompt: Prompt, max_new_tokens: int, announce: Announce
) -> tuple[list[Outcome], float]:
    inputs = _inputs(model, tokenizer, prompt)
    methods = _methods(model)
    found: dict[str, tuple[str, float, float]] = {}
    for name, method in methods.items():
        announce(f"the speaker answers: {name}")
        reply = Steered(model, tokenizer, method).chat(
            prompt, max_new_tokens=max_new_tokens, do_sample=False
        )
        announce(f"measuring: {name}")
        mass = attention_mass(model, inputs["input_ids"], inputs["anchors"], method)
        probability = answer_probability(
            model, tokenizer, inputs["input_ids"], inputs["anchors"], method, ANSWER_STEM, ANSWER
        )
        found[name] = reply.text.strip(), float(mass.mean()), probability
    times, scatter = _times(model, inputs, methods, announce)
    base = times[UNSTEERED]
    outcomes = [
        Outcome(
            name,
            reply,
            states_figure(reply),
            mass,
            probability,
            *times[name],
            times[name][0] / base[0],
            times[name][1] / base[1],
        )
        for name, (reply, mass, probability) in found.items()
    ]
    return outcomes, scatter


@torch.no_grad()
def answer_probability(
    model: Any,
    tokenizer: Any,
    input_ids: Tensor,
    anchors: Tensor,
    method: Method,
    stem: str,
    answer: str,
) -> float:
    """Compute how probable an answer is once the reply has begun with a given stem.

    The stem and the answer are forced in one pass behind the prompt's: the probability is the
    product over the answer's tokens of `softmax(logits)[token]`, with the method's own (for SPA
    blended) logits. No temperature or other logits processor applies.

    Args:
        model: a transformers causal language model in evaluation mode.
        tokenizer: its tokenizer, one that reports character offsets.
        input_ids: int64 [1, prompt], chat template and generation prompt included.
        anchors: bool [1, prompt].
        method: the method that is applied.
        stem: how the reply begins.
        answer: how it goes on, leading blank included.

    Returns:
        A probability, 0 to 1.
    """
    tokens = tokenizer(stem + answer, add_special_tokens=False, return_offsets_mapping=True)
    forced = torch.tensor([tokens["input_ids"]], device=input_ids.device)
    # The answer's tokens are those that reach beyond the stem: a tokenizer may merge across it.
    first = next(
        place for place, (_, end) in enumerate(tokens["offset_mapping"]) if end > len(stem)
    )
    with method.applied_to(model, anchors):
        prompt = model(input_ids, use_cache=True, logits_to_keep=1)
        cache = "cache" if "cache" in prompt else "past_key_values"  # transformers 5.24 renamed it
        reply = model(forced, use_cache=True, **{cache: prompt[cache]})
    # A token is predicted by the logits before it.
    logits = torch.cat([prompt.logits, reply.logits[:, :-1]], dim=1)[0, first:]
    answer_ids = forced[0, first:, None].to(logits.device)
    chances = logits.float().log_softmax(dim=-1).gather(1, answer_ids)
    return float(chances.sum().exp())


class _Stopwatch(BaseStreamer):
    """Notes when each token of one reply arrives; the prompt itself is announced first."""

    def __init__(self) -> None:
        self.ticks: list[float] = []

    def put(self, value: Tensor) -> None:
        self.ticks.append(time.perf_counter())

    def end(self) -> None:
        return


def _times(
    model: Any,
    inputs: dict[str, Tensor],
    methods: dict[str, Method],
    announce: Announce,
) -> tuple[dict[str, tuple[float, float]], float]:
    """Time each method in turn, several times over: medians of milliseconds, and their scatter."""
    prefill: dict[str, list[float]] = {name: [] for name in methods}
    step: dict[str, list[float]] = {name: [] for name in methods}
    ids, mask, anchors = inputs["input_ids"], inputs["attention_mask"], inputs["anchors"]
    for repeat in range(REPEATS):
        announce(f"timing, {repeat + 1} of {REPEATS}")
        for name, method in methods.items():
            watch = _Stopwatch()
            length = {"max_new_tokens": TIMED_TOKENS, "min_new_tokens": TIMED_TOKENS}
            start = time.perf_counter()
            Steered(model, None, method).generate(
                ids,
                attention_mask=mask,
                anchors=anchors,
                do_sample=False,
                streamer=watch,
                **length,
            )
            prefill[name].append(watch.ticks[1] - start)
            step[name] += [after - at for at, after in pairwise(watch.ticks[1:])]
    fast, *_, slow = statistics.quantiles(step[UNSTEERED], n=10)
    medians = {
        name: (1e3 * statistics.median(prefill[name]), 1e3 * statistics.median(step[name]))
        for name in methods
    }
    return medians, slow / fast
