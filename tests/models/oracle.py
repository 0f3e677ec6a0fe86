"""What a steered model must say, computed without a cache, hooks or Radar's own attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from radar_core import PRISM, SEKA, SPA, AttentionBias, Method, SecondPrompt, TargetMass
from radar_core.methods import Projections
from radar_core.methods.key_edit import KeyEdit
from radar_core.methods.projections import Subspace
from radar_core.methods.two_branch import TwoBranch
from radar_kernels.testing import blend_oracle
from tests.models.tiny import (
    biased_logits,
    eager_twin,
    extended,
    full_logits,
    hidden_logits,
    prompts,
)

# Two prompts that many tests share, longer than the tiny models' windows, and how they are run.
BATCH: dict[str, Any] = dict(lengths=[23, 17], anchored=[[3, 4, 5, 12, 20], [2, 9, 10]])
GREEDY: dict[str, Any] = dict(do_sample=False, output_logits=True, return_dict_in_generate=True)
# Shorter ones, and methods of every kind, for tests of how a model is run.
INPUTS = prompts([20, 13], [[5, 6, 11], [2, 3]])
ANCHORS = INPUTS.pop("anchors")
METHODS = [
    SPA(1.4),
    AttentionBias(2.0),
    AttentionBias(2.0, layers=[0], heads=[0, 3], queries="generated"),
    TargetMass(0.3),
    TargetMass(0.3, mode="exact", heads=[1], queries="generated"),
]

_names = itertools.count()


class Oracle:
    """Next-token logits of a steered model, from uncached passes over whole sequences.

    SPA, CFG and CAD blend two passes, a bias is added to eager attention's float mask, a target
    mass is reached in an attention of a few lines, and keys are edited one by one.

    Args:
        model: the unsteered model.
        method: the steering.
        anchors: [rows, prompt] bool, or factors of a bias; None where the method takes none.
        attention_mask: [rows, prompt]; None if nothing is padded.
    """

    def __init__(
        self,
        model: Any,
        method: Method,
        anchors: Tensor | None,
        attention_mask: Tensor | None = None,
    ) -> None:
        self.method = method
        if attention_mask is None:
            assert anchors is not None
            attention_mask = torch.ones_like(anchors).long()
        self.mask = attention_mask
        self.anchors = torch.zeros_like(self.mask, dtype=torch.bool) if anchors is None else anchors
        self.twin = eager_twin(model)

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the logits [rows * n, vocabulary] after sequences [rows * n, tokens]."""
        times = ids.shape[0] // self.anchors.shape[0]
        anchors = self.anchors.repeat_interleave(times, dim=0)
        mask = self.mask.repeat_interleave(times, dim=0)
        method = self.method
        if isinstance(method, TwoBranch):
            full = full_logits(self.twin, ids, mask)
            second = self._second(ids, mask, anchors)
            strength = torch.tensor(method.strengths())
            strength = strength.repeat_interleave(ids.shape[0] // len(strength), dim=0)
            modulated = getattr(method, "modulated", False)
            return blend_oracle(full, second, strength, modulated=modulated).float()
        if isinstance(method, KeyEdit):
            return edited_logits(self.twin, ids, mask, anchors, method)
        assert isinstance(method, AttentionBias | TargetMass)
        first_query = anchors.shape[1] - 1 if method.queries == "generated" else 0
        if isinstance(method, AttentionBias):
            config = self.twin.config.get_text_config()
            plans = {
                layer: method.layer_plan(
                    layer, config.num_hidden_layers, config.num_attention_heads
                )
                for layer in range(config.num_hidden_layers)
            }
            bias = {layer: plan.bias for layer, plan in plans.items() if plan is not None}
            return biased_logits(self.twin, ids, mask, anchors, bias, first_query)
        return mass_logits(self.twin, ids, mask, anchors, method.mass, first_query)

    def _second(self, ids: Tensor, mask: Tensor, anchors: Tensor) -> Tensor:
        """Return what the second branch says."""
        method, prompt = self.method, mask.shape[1]
        if isinstance(method, SecondPrompt):
            if method.prompt_ids is not None:
                times = ids.shape[0] // len(method.prompt_ids)
                other, seen = (
                    torch.tensor(rows).repeat_interleave(times, dim=0)
                    for rows in (method.prompt_ids, method.prompt_mask)
                )
            else:
                other, seen = without(ids[:, :prompt], mask, anchors)
            return full_logits(self.twin, torch.cat([other, ids[:, prompt:]], dim=1), seen)
        assert isinstance(method, SPA)
        if method.masking == "embedding":
            assert method.mask_token_id is not None
            return replaced_logits(self.twin, ids, mask, anchors, method.mask_token_id)
        if method.branch == "direct":
            return direct_logits(self.twin, ids, mask, anchors)
        return hidden_logits(self.twin, ids, mask, anchors)


def close_at_every_step(
    out: Any,
    expected: Callable[[Tensor], Tensor],
    prompt: int,
    atol: float = 1e-4,
    steps: Iterable[int] | None = None,
) -> None:
    """Assert that a generation's logits are those expected after the tokens before them.

    Args:
        out: what `generate` returned, with `output_logits`.
        expected: sequences [rows, tokens] -> logits [rows, vocabulary], an `Oracle` say.
        prompt: how many tokens the prompt has.
        atol: how far they may be apart.
        steps: which steps to look at; None for all.
    """
    for step in range(len(out.logits)) if steps is None else steps:
        right = expected(out.sequences[:, : prompt + step])
        torch.testing.assert_close(out.logits[step].float(), right, atol=atol, rtol=0)


# -- second branches -------------------------------------------------------------------------------


def without(ids: Tensor, mask: Tensor, left_out: Tensor) -> tuple[Tensor, Tensor]:
    """Return left-padded prompts without some of their tokens, built row by row, and their mask."""
    rows = [row[keep] for row, keep in zip(ids, mask.bool() & ~left_out.bool(), strict=True)]
    longest = max(len(row) for row in rows)
    shorter = torch.zeros(len(rows), longest, dtype=torch.long)
    seen = torch.zeros_like(shorter)
    for row, kept in enumerate(rows):
        shorter[row, longest - len(kept) :] = kept
        seen[row, longest - len(kept) :] = 1
    return shorter, seen


@torch.no_grad()
def replaced_logits(model: Any, ids: Tensor, mask: Tensor, anchors: Tensor, token: int) -> Tensor:
    """Return the last position's logits with a token in the place of each anchor."""
    replaced = torch.where(extended(anchors, ids.shape[1], False), token, ids)
    return full_logits(model, replaced, mask)


@torch.no_grad()
def direct_logits(twin: Any, ids: Tensor, mask: Tensor, anchors: Tensor) -> Tensor:
    """Return the last position's logits where the answer's queries alone cannot see the anchors.

    Args:
        twin: the model with eager attention.
    """
    length, prompt = ids.shape[1], anchors.shape[1]
    seen = extended(mask, length, 1)
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    late = torch.arange(length) >= prompt - 1
    hidden = extended(anchors, length, False)[:, None, None, :] & late[None, None, :, None]
    allowed = causal & seen[:, None, None, :].bool() & ~hidden
    window = getattr(twin.config, "sliding_window", None)
    near = causal & ~torch.ones_like(causal).tril(-(window or length))
    forbidden = torch.finfo(torch.float32).min
    masks = {
        kind: torch.where(pattern, 0.0, forbidden)
        for kind, pattern in (
            ("full_attention", allowed),
            ("sliding_attention", allowed & near),
        )
    }
    kinds = getattr(twin.config, "layer_types", None)
    given = masks if kinds else masks["sliding_attention" if window else "full_attention"]
    if kinds and len(set(kinds)) == 1:
        given = masks[kinds[0]]
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    return twin(ids, attention_mask=given, position_ids=positions).logits[:, -1].float()


# -- a share of the attention ----------------------------------------------------------------------


@torch.no_grad()
def mass_logits(
    twin: Any, ids: Tensor, mask: Tensor, anchors: Tensor, target: float, first_query: int = 0
) -> Tensor:
    """Return the last position's logits with at least a target share of attention on anchors.

    Every layer and head forms its whole matrix of scores, in an uncached pass.

    Args:
        twin: the model with eager attention.
    """
    seen = extended(mask, ids.shape[1], 1)
    keys = extended(anchors, ids.shape[1], False)[:, None, None, :].float()
    steered = (torch.arange(ids.shape[1]) >= first_query)[:, None]

    def attend(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (states.repeat_interleave(groups, dim=1) for states in (key, value))
        scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + attention_mask
        if s_aux is not None:
            sinks = s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        anchored = torch.nn.functional.pad(keys, (0, scores.shape[-1] - keys.shape[-1]))
        mass = (scores.softmax(-1) * anchored).sum(-1, keepdim=True)
        wanted = torch.logit(torch.tensor(target)) - torch.logit(mass)
        raised = torch.where((mass > 0) & (mass < 1) & (wanted > 0) & steered, wanted, 0.0)
        weights = (scores + raised * anchored).softmax(-1)[..., : key.shape[2]]
        return (weights @ value).transpose(1, 2).contiguous(), None

    name = f"target_mass_oracle_{next(_names)}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, eager_mask)
    try:
        twin.set_attn_implementation(name)
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        logits = twin(ids, attention_mask=seen, position_ids=positions).logits
    finally:
        twin.set_attn_implementation("eager")
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)
    return logits[:, -1].float()


# -- edited keys -----------------------------------------------------------------------------------


def heads_of(model: Any) -> tuple[int, int, int]:
    """Return a model's number of query heads and of key heads, and the length of one head."""
    config = model.config
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    return heads, key_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def made_up(model: Any, seed: int = 0, layers: tuple[int, ...] | None = None) -> Projections:
    """Return projections of random covariances, of the shape of a model."""
    count = model.config.num_hidden_layers
    _, heads, size = heads_of(model)
    chosen = tuple(range(count)) if layers is None else layers
    generator = torch.Generator().manual_seed(seed)
    spectrum = 0.6 ** torch.arange(size)

    def subspace() -> Subspace:
        random = torch.randn(len(chosen), heads, size, size, generator=generator)
        return Subspace(torch.linalg.qr(random)[0].contiguous(), spectrum.expand(*random.shape[:3]))

    distance = torch.rand(len(chosen), heads, generator=generator)
    return Projections(
        model_type=model.config.model_type,
        num_layers=count,
        layers=chosen,
        tokens=40,
        positive=subspace(),
        negative=subspace(),
        difference=subspace(),
        mean_distance=distance,
        frobenius_distance=distance / 3,
    )


def projector(
    subspace: Subspace, index: int, head: int, share: float, last: bool = False
) -> Tensor:
    """Return the projector as the paper has it, direction by direction."""
    vectors, values = subspace.vectors[index, head].double(), subspace.values[index, head].double()
    held, rank = 0.0, 0
    while held < share * float(values.sum()):
        held += float(values[rank])
        rank += 1
    chosen = vectors[:, rank:] if last else vectors[:, :rank]
    return chosen @ chosen.T


def expected_delta(method: Any, layer: int, key: Tensor, query: Tensor) -> Tensor:
    """Return what is added to keys [heads, D] of one token, in float64; `query` is [heads, D]."""
    out = torch.zeros_like(key, dtype=torch.float64)
    for head in range(key.shape[0]):
        k = key[head].double()
        first = method.learned[0]
        index = first.layers.index(layer)
        distance = float(first.mean_distance[index, head])
        if isinstance(method, SEKA):
            if distance >= method.least_distance:
                plus = projector(first.positive, index, head, method.variance) @ k
                minus = projector(first.negative, index, head, method.variance, last=True) @ k
                out[head] = (method.positive_gain * plus + method.negative_gain * minus) / 2
        elif isinstance(method, PRISM):
            far = float(first.frobenius_distance[index, head]) - method.least_distance
            moved = projector(first.difference, index, head, method.variance) @ k
            out[head] = method.gain * math.log1p(math.exp(far)) * moved
        else:
            group = query.shape[0] // key.shape[0]
            q = query[head * group : (head + 1) * group].double().mean(0)
            q = q / q.norm()
            weights, parts = [], []
            for expert in method.experts:
                u = expert.positive.vectors[index, head, :, : method.rank].double()
                s = expert.positive.values[index, head, : method.rank].double()
                weights.append(float(((q @ u) * s).sum()))
                parts.append(u @ (u.T @ k))
            largest = max(abs(weight) for weight in weights)
            pairs = zip(weights, parts, strict=True)
            out[head] = method.gain * sum(w / largest * part for w, part in pairs)
    return out


def by_token(
    output: Tensor, what: str, kind: str, heads: int, size: int, query_heads: int
) -> Tensor:
    """Return a view [B, T, heads, size] of what a module gave, by the family's own layout."""
    if kind == "gpt2":
        return output.split(heads * size, dim=-1)[what == "key"].unflatten(-1, (heads, size))
    if kind == "phi3":
        start = query_heads * size if what == "key" else 0
        return output[..., start : start + heads * size].unflatten(-1, (heads, size))
    if kind == "gpt_neox":
        start = size if what == "key" else 0
        return output.unflatten(-1, (heads, 3 * size))[..., start : start + size]
    if kind == "gemma3_text":
        return output.transpose(1, 2)
    return output if output.dim() == 4 else output.unflatten(-1, (heads, size))


def module_of(attention: Any, what: str, kind: str) -> Any:
    """Return the module that gives a layer's queries or keys before rotary embedding."""
    fused = {"gpt2": "c_attn", "phi3": "qkv_proj", "gpt_neox": "query_key_value"}
    if kind in fused:
        return getattr(attention, fused[kind])
    return getattr(attention, f"{what[0]}_norm", None) or getattr(attention, f"{what[0]}_proj")


@torch.no_grad()
def edited_logits(twin: Any, ids: Tensor, mask: Tensor, anchors: Tensor, method: KeyEdit) -> Tensor:
    """Return the last logits of one uncached pass whose keys are edited token by token.

    Args:
        twin: the model with eager attention.
    """
    heads, key_heads, size = heads_of(twin)
    kind = twin.config.model_type
    queries: dict[int, Tensor] = {}
    handles = []

    def note(layer: int) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> None:
            view = by_token(output, "query", kind, heads, size, heads)
            queries[layer] = view[:, anchors.shape[1] - 1]

        return hook

    def edit(layer: int) -> Any:
        def hook(module: Any, args: Any, output: Tensor) -> Tensor:
            new = output.clone()
            view = by_token(new, "key", kind, key_heads, size, heads)
            for row, token in anchors.nonzero().tolist():
                key = view[row, token]
                delta = expected_delta(method, layer, key, queries[layer][row])
                view[row, token] = (key.double() + delta).to(key.dtype)
            return new

        return hook

    for module in twin.modules():
        layer = getattr(module, "layer_idx", None)
        if "Attention" in type(module).__name__ and layer in method.steered_layers:
            for what, make in (("query", note), ("key", edit)):
                site = module_of(module, what, kind)
                handles.append(site.register_forward_hook(make(layer)))
    try:
        return full_logits(twin, ids, mask)
    finally:
        for handle in handles:
            handle.remove()
