"""Is the result right? Every contender against forward passes that use nobody's shortcuts."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.contenders import SPA_STRENGTH, Case, Contender, Target, seka

# float32: probabilities within this times max(1, strength); bias logits within the second.
PROBABILITY_TOLERANCE = 1e-5
LOGIT_TOLERANCE = 1e-4
# bfloat16: the mean total variation distance may be this many times the unsteered model's own
# (times the blend's amplification), is never asked to be below the second, and never let above the
# third.
BF16_SLACK = 2.0
BF16_LEAST = 0.005
BF16_MOST = 0.1
# bfloat16: rounding can be as large as steering, but points elsewhere: along the direction in which
# steering moves the logits, a result must have gone this part of the way. No steering goes 0.
BF16_PART_OF_THE_WAY = (0.5, 1.5)
MOST_EAGER_TOKENS = 4096
# Anchors that nobody can see.
HIDDEN = Target(bias=torch.finfo(torch.float32).min)


@dataclass(frozen=True)
class Trace:
    """A contender's own tokens and what it chose them from, of the last prompt of the batch.

    Args:
        tokens: int64 [steps].
        scores: float32 [steps, vocabulary], after the contender's processing.
    """

    tokens: Tensor
    scores: Tensor

    @property
    def probabilities(self) -> Tensor:
        """softmax of the scores."""
        return self.scores.softmax(-1)


@dataclass(frozen=True)
class Verdict:
    """Whether a result is right, and what that was found by.

    Args:
        right: whether it may be timed.
        text: what was compared and how near it came.
    """

    right: bool
    text: str


@dataclass
class Oracle:
    """Uncached float32 forward passes with explicit 4-D masks.

    Through eager attention, or, where that would take gigabytes, through SDPA with the same mask.

    Args:
        model: a copy of the contenders' weights in float32, used by nobody else.
    """

    model: Any
    _known: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Any) -> Oracle:
        """Copy a model's weights to float32, as they are after rounding to its dtype."""
        return cls(copy.deepcopy(model).float())

    def logits(self, case: Case, tokens: Tensor, target: Target) -> Tensor:
        """Compute what a contender should have chosen its tokens from.

        Args:
            case: the work.
            tokens: int64 [steps], the tokens that followed the prompt.
            target: what the contender claims to compute.

        Returns:
            float32 [steps, vocabulary].
        """
        full = self._forward(case, tokens, target)
        if target.strength == 1.0:
            return full
        hidden = self._forward(case, tokens, HIDDEN)
        return torch.lerp(hidden, full, target.strength)

    def _forward(self, case: Case, tokens: Tensor, target: Target) -> Tensor:
        """Run one branch: a target's bias or edited keys, whatever its strength."""
        branch = replace(target, strength=1.0)
        prompt = case.prompt.input_ids[-1:]
        anchored = branch.anchors(case)[-1].nonzero()[:, 0] if branch.is_steered else tokens[:0]
        key = (tuple(prompt[0].tolist()), tuple(tokens.tolist()), branch, tuple(anchored.tolist()))
        if key not in self._known:
            ids = torch.cat([prompt, tokens[None, :-1]], dim=1)
            minimum = torch.finfo(torch.float32).min
            mask = torch.full((ids.shape[1], ids.shape[1]), minimum).triu(1)
            if not branch.few_heads:
                mask[:, anchored] += branch.bias
                mask.clamp_(min=minimum)
            eager = ids.shape[1] <= MOST_EAGER_TOKENS
            self.model.set_attn_implementation("eager" if eager else "sdpa")
            with contextlib.ExitStack() as stack:
                for attention in self._hooked(branch):
                    if branch.few_heads:
                        hook = _pasta_mask(attention, self.model, branch.bias, prompt, anchored)
                        stack.callback(hook.remove)
                    if branch.edits_keys:
                        hook = _edited_keys(attention, seka(case.model), anchored)
                        stack.callback(hook.remove)
                self._known[key] = self.model(
                    input_ids=ids,
                    attention_mask=mask[None, None],
                    use_cache=False,
                    logits_to_keep=len(tokens),
                ).logits[0]
        return self._known[key]

    def _hooked(self, branch: Target) -> list[Any]:
        """Return the attention modules that a branch changes something in."""
        if not (branch.few_heads or branch.edits_keys):
            return []
        return [layer.self_attn for layer in self.model.base_model.layers]


def _pasta_mask(attention: Any, model: Any, bias: float, prompt: Tensor, anchored: Tensor) -> Any:
    """Add PASTA's bias to the mask of a layer, for its heads: on anchors and on what follows."""
    heads = torch.zeros(model.config.num_attention_heads)
    heads[list(peers.pasta_heads(model)[attention.layer_idx])] = bias

    def add(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        mask = kwargs["attention_mask"]
        columns = torch.zeros(mask.shape[-1])
        columns[anchored] = 1.0
        columns[prompt.shape[1] :] = 1.0
        added = heads[:, None, None] * columns
        minimum = torch.finfo(torch.float32).min
        return args, kwargs | {"attention_mask": (mask + added).clamp(min=minimum)}

    return attention.register_forward_pre_hook(add, with_kwargs=True)


def _edited_keys(attention: Any, method: Any, anchored: Tensor) -> Any:
    """Edit the keys of anchored tokens in a layer, before rotary embedding, head by head."""
    found, layer = method.projections, attention.layer_idx
    matrices = [
        method.positive_gain * _projector(found.positive, layer, head, method.variance)
        + method.negative_gain * _projector(found.negative, layer, head, method.variance, rest=True)
        for head in range(found.key_heads)
    ]

    def edit(module: Any, args: Any, output: Tensor) -> Tensor:
        edited = output.clone()
        keys = edited.view(*output.shape[:2], found.key_heads, found.head_size)
        for head, matrix in enumerate(matrices):
            chosen = keys[:, anchored, head]
            keys[:, anchored, head] = chosen + chosen @ matrix / 2
        return edited

    site = getattr(attention, "k_norm", attention.k_proj)
    return site.register_forward_hook(edit)


def _projector(subspace: Any, layer: int, head: int, share: float, rest: bool = False) -> Tensor:
    """Return a subspace's projector, its rank counted value by value."""
    vectors, values = subspace.vectors[layer, head], subspace.values[layer, head]
    held, rank = 0.0, 0
    while held < share * float(values.sum()):
        held += float(values[rank])
        rank += 1
    chosen = vectors[:, rank:] if rest else vectors[:, :rank]
    return chosen @ chosen.T


def trace(contender: Contender, case: Case, steps: int) -> Trace:
    """Let a contender generate and keep what it chose every token from.

    Args:
        contender: who.
        case: the work.
        steps: how many tokens.

    Returns:
        Its trace.
    """
    out = contender.generate(
        case, max_new_tokens=steps, return_dict_in_generate=True, output_scores=True
    )
    tokens = out.sequences[-1, case.prompt.tokens :]
    return Trace(tokens.clone(), torch.stack([scores[-1] for scores in out.scores]).float())


def judge(
    contender: Contender,
    case: Case,
    found: Trace,
    oracle: Oracle,
    twins: Mapping[str, Trace],
    plain: Trace,
) -> Verdict:
    """Judge a trace against the oracle and, in float32, against the contender's twin.

    Args:
        contender: who; its target is not None.
        case: the work.
        found: its trace.
        oracle: of the case's model.
        twins: traces of contenders that were right.
        plain: the unsteered model's trace, which shows how much bfloat16 rounds.

    Returns:
        The verdict.
    """
    target = contender.target
    if target is None:
        raise ValueError("contender has no target; expected one that the oracle can compute")
    expected = oracle.logits(case, found.tokens, target)
    if not bool(found.scores.isfinite().all()):
        return Verdict(False, "scores are not finite")
    if case.dtype == "bf16":
        return _judge_bf16(found, target, plain, oracle, case)
    verdict = _judge_fp32(found, expected, target)
    twin = twins.get(contender.twin or "")
    if not verdict.right or twin is None:
        return verdict
    same = torch.equal(found.tokens, twin.tokens)
    error = float((found.probabilities - twin.probabilities).abs().max()) if same else float("nan")
    return Verdict(
        same and error <= PROBABILITY_TOLERANCE * max(1.0, abs(target.strength)),
        f"{verdict.text}; {'same' if same else 'NOT the same'} tokens as {contender.twin}, "
        f"probabilities within {error:.1e}",
    )


def distance(found: Trace, expected: Tensor) -> float:
    """Return the total variation distance between two distributions, mean over the steps.

    Args:
        found: the trace.
        expected: float32 [steps, vocabulary] logits.

    Returns:
        A number in [0, 1].
    """
    return float((found.probabilities - expected.softmax(-1)).abs().sum(-1).mean()) / 2


def judge_anchoring(contender: Contender, case: Case, steps: int) -> Verdict:
    """Judge the released package by what can be known of it.

    From the second token on it attends to its placeholders again, and its second prompt is shorter
    than the first, so it is nobody's equal. Known are its first step (the blend of the full prompt
    with its own second prompt) and that it runs two forward passes a token.

    Args:
        contender: the released package.
        case: the work.
        steps: how many tokens.

    Returns:
        The verdict.
    """
    with _counted_forwards(case.model) as forwards:
        found = trace(contender, case, steps)
    processor = peers.anchoring_processor(case, SPA_STRENGTH)
    full = case.model(case.prompt.input_ids, logits_to_keep=1).logits[:, -1].float()
    second = case.model(
        processor.aux_input_ids, attention_mask=processor.attention_mask, logits_to_keep=1
    ).logits[:, -1]
    expected = torch.lerp(second.float(), full, SPA_STRENGTH)
    first = Trace(found.tokens[:1], found.scores[:1])
    error = distance(first, expected)
    tolerance = 1e-4 if case.dtype == "fp32" else 0.05
    return Verdict(
        forwards[0] == 2 * steps and error <= tolerance,
        f"{forwards[0]} forwards for {steps} tokens; first token within {error:.1e} (total "
        f"variation) of the blend with its own second prompt of {second_length(processor)} "
        f"tokens; later steps drop its mask and equal nobody's",
    )


def second_length(processor: Any) -> int:
    """Return the length of the released package's second prompt."""
    return int(processor.aux_input_ids.shape[1])


def _judge_fp32(found: Trace, expected: Tensor, target: Target) -> Verdict:
    gap = expected.max(-1).values - expected.gather(-1, found.tokens[:, None])[:, 0]
    errors = {"probabilities": float((found.probabilities - expected.softmax(-1)).abs().max())}
    limits = {"probabilities": PROBABILITY_TOLERANCE * max(1.0, abs(target.strength))}
    if target.bias or target.edits_keys:
        errors["logits"] = float((found.scores - expected).abs().max())
        limits["logits"] = LOGIT_TOLERANCE
    within = ", ".join(f"{name} within {error:.1e}" for name, error in errors.items())
    greedy = float(gap.max()) <= 2 * LOGIT_TOLERANCE
    return Verdict(
        greedy and all(errors[name] <= limits[name] for name in errors),
        f"{len(found.tokens)} tokens {'greedy by' if greedy else 'NOT greedy by'} an uncached "
        f"oracle, {within}",
    )


def _judge_bf16(found: Trace, target: Target, plain: Trace, oracle: Oracle, case: Case) -> Verdict:
    error = distance(found, oracle.logits(case, found.tokens, target))
    rounding = distance(plain, oracle.logits(case, plain.tokens, Target()))
    limit = BF16_SLACK * target.amplification * rounding
    limit = min(max(limit, BF16_LEAST), BF16_MOST)
    text = f"total variation {error:.4f} from a float32 oracle (at most {limit:.4f})"
    if not target.is_steered:
        return Verdict(error <= limit, text)
    # What unsteered rounding does along that direction is no steering.
    part = _part_of_the_way(found, target, oracle, case)
    part -= _part_of_the_way(plain, target, oracle, case)
    least, most = BF16_PART_OF_THE_WAY
    return Verdict(
        error <= limit and least <= part <= most,
        f"{text}, {part:.2f} of the way from unsteered to steered ({least} to {most})",
    )


def _part_of_the_way(found: Trace, target: Target, oracle: Oracle, case: Case) -> float:
    """Project a result on the way from unsteered to steered logits: 0 is the one, 1 the other."""
    start, end, at = (
        logits - logits.mean(-1, keepdim=True)
        for logits in (
            oracle.logits(case, found.tokens, Target()),
            oracle.logits(case, found.tokens, target),
            found.scores,
        )
    )
    way = end - start
    return float(((at - start) * way).sum() / (way * way).sum())


@contextmanager
def _counted_forwards(model: Any) -> Iterator[list[int]]:
    count = [0]

    def hook(*_: Any) -> None:
        count[0] += 1

    handle = model.register_forward_pre_hook(hook)
    try:
        yield count
    finally:
        handle.remove()
