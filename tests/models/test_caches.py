"""Every kind of cache, and caches that are carried over from one call to another."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
from transformers import StaticCache
from transformers.cache_utils import DynamicCache

from radar_core import SPA, AttentionBias, Steered, TargetMass
from radar_core.hooks.provenance import SteeredCache
from tests.models.oracle import BATCH, GREEDY, Oracle, close_at_every_step
from tests.models.tiny import MIXED, LosslessQuantizedCache, extended, prompts, tiny_model

METHODS = [
    SPA(1.4),
    AttentionBias(2.0),
    AttentionBias(2.0, queries="generated"),
    TargetMass(0.3),
    TargetMass(0.3, queries="generated"),
]
EVERY = [method for method in METHODS if getattr(method, "queries", "all") == "all"]
GENERATED = [method for method in METHODS if method not in EVERY]


def named(method):
    return f"{type(method).__name__}-{getattr(method, 'queries', '')}"


def new_cache(kind, model, length=64):
    if kind == "static":
        return StaticCache(config=model.config, max_cache_len=length)
    if kind == "quantized":
        return LosslessQuantizedCache(model.config)
    return DynamicCache(config=model.config)


def returned_cache(out):
    return out["cache"] if "cache" in out else out["past_key_values"]


def family_model(family):
    shape = {"Gemma2-mixed": MIXED["Gemma2"], "Gemma3Text": MIXED["Gemma3Text"]}.get(family)
    implementation = "eager" if family.startswith("Gemma2") else "sdpa"
    return tiny_model(family.removesuffix("-mixed"), implementation, shape=shape)


CACHES = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "chunks": {"prefill_chunk_size": 5},
    "static chunks": {
        "cache_implementation": "static",
        "disable_compile": True,
        "prefill_chunk_size": 5,
    },
}


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize(
    ("family", "cache"),
    [
        *itertools.product(["Llama", "Mistral", "Gemma2-mixed", "Gemma3Text"], CACHES),
        ("Llama", "quantized"),
        ("Qwen3", "quantized chunks"),
    ],
)
def test_every_cache_gives_what_no_cache_gives(family, cache, method):
    """Prompts of 23 tokens past windows of 6 and 8, left-padded, each step on its own."""
    model, inputs = family_model(family), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    options = dict(CACHES.get(cache, {}))
    if cache.startswith("quantized"):
        options = {"past_key_values": new_cache("quantized", model)}
        if cache.endswith("chunks"):
            options["prefill_chunk_size"] = 5
    with method.applied_to(model, anchors=anchors):
        out = model.generate(**inputs, **GREEDY, max_new_tokens=9, **options)
    oracle = Oracle(model, method, anchors, inputs["attention_mask"])
    close_at_every_step(out, oracle, 23, steps=[0, 1, 4, 8])


@pytest.mark.parametrize("method", [*METHODS, TargetMass(0.3, "exact", queries="generated")])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_prompt_given_token_by_token(kind, method):
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6, 15]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    with torch.no_grad(), method.applied_to(model, anchors):
        cache, single = new_cache(kind, model), new_cache(kind, model)
        model(ids[:, :14], past_key_values=cache)
        whole = model(ids[:, 14:], past_key_values=cache).logits[:, -1]
        model(ids[:, :14], past_key_values=single)
        for token in range(14, 20):
            logits = model(ids[:, token : token + 1], past_key_values=single).logits[:, -1]
    torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
    if getattr(method, "mode", "at_least") == "at_least":
        torch.testing.assert_close(whole, Oracle(model, method, anchors)(ids), atol=1e-4, rtol=0)


@pytest.mark.smoke
@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *itertools.product(["Llama", "Mistral"], ["dynamic", "static"]),
        ("Qwen3", "quantized"),  # transformers has them for full attention only
    ],
)
def test_a_longer_prompt_on_the_cache_of_its_beginning_equals_a_fresh_run(family, kind, method):
    """A first call leaves its cache; the next one runs only what is new, under the same anchors."""
    model, inputs = tiny_model(family), prompts([20], [[5, 6]])
    first, ids = inputs["anchors"], inputs["input_ids"]
    cache = new_cache(kind, model)
    with method.applied_to(model, first):
        start = model.generate(ids, **GREEDY, max_new_tokens=4, past_key_values=cache)
    more = torch.randint(1, 97, (1, 6), generator=torch.Generator().manual_seed(2))
    longer = torch.cat([start.sequences, more], dim=1)
    anchors = extended(first, longer.shape[1], False)
    anchors[0, 26] = True  # a new anchor, behind what the cache holds
    with method.applied_to(model, anchors):
        fresh = model.generate(longer, **GREEDY, max_new_tokens=4)
        if getattr(method, "queries", "all") == "generated":
            # The cache holds the first answer, steered while it was generated.
            with pytest.raises(ValueError, match=r"from token 19 on; .*mix both"):
                model.generate(longer, past_key_values=cache, max_new_tokens=4)
            return
        given = copy.deepcopy(cache)
        kept = model.generate(longer, **GREEDY, max_new_tokens=4, past_key_values=given)
        seen = torch.ones_like(longer)
        tail = longer[:, int(cache.get_seq_length()) :]
        alone = model.generate(
            tail, attention_mask=seen, **GREEDY, max_new_tokens=4, past_key_values=cache
        )
    oracle = Oracle(model, method, anchors)
    close_at_every_step(kept, oracle, longer.shape[1])
    assert torch.equal(kept.sequences, fresh.sequences)
    for one, other in zip(kept.logits, alone.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", GENERATED, ids=named)
def test_a_cut_cache_serves_a_longer_prompt(method):
    """Under "generated" a cache is the unsteered one up to the last token of its prompt."""
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    first, ids = inputs["anchors"], inputs["input_ids"]
    cache = new_cache("dynamic", model)
    with method.applied_to(model, first):
        start = model.generate(ids, **GREEDY, max_new_tokens=4, past_key_values=cache)
    cache.crop(-(cache.get_seq_length() - 19))
    anchors = extended(first, start.sequences.shape[1], False)
    with method.applied_to(model, anchors):
        out = model.generate(start.sequences, **GREEDY, max_new_tokens=4, past_key_values=cache)
    close_at_every_step(out, Oracle(model, method, anchors), start.sequences.shape[1])


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_an_unsteered_cache_of_what_steering_leaves_alone_serves_on(kind, method):
    """Up to the first anchor, and for "generated" up to the prompt's last token."""
    model, inputs = tiny_model("Llama"), prompts([20], [[8, 12]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    untouched = 19 if method in GENERATED else 8
    for length, fits in ((untouched, True), (untouched + 1, False)):
        if length == 20:
            continue  # nothing of the prompt would be left to run
        cache = new_cache(kind, model)
        with torch.no_grad():
            model(ids[:, :length], past_key_values=cache)
        with method.applied_to(model, anchors):
            if fits:
                out = model.generate(ids, **GREEDY, max_new_tokens=4, past_key_values=cache)
                close_at_every_step(out, Oracle(model, method, anchors), 20)
            else:
                with pytest.raises(ValueError, match=r"9 tokens that ran unsteered.*token 8 on"):
                    model.generate(ids, max_new_tokens=4, past_key_values=cache)


def steered_cache(model, method, anchors, ids, kind="dynamic"):
    cache = new_cache(kind, model)
    with torch.no_grad(), method.applied_to(model, anchors):
        model(ids, past_key_values=cache)
    return cache


PICKLED = pytest.param(lambda c: pickle.loads(pickle.dumps(c)), marks=pytest.mark.smoke)


@pytest.mark.parametrize("method", METHODS, ids=named)
@pytest.mark.parametrize("kind", ["dynamic", "static", "quantized"])
@pytest.mark.parametrize("carry", [None, copy.deepcopy, PICKLED])
def test_a_model_that_is_not_steered_refuses_a_steered_cache(kind, method, carry):
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    cache = steered_cache(model, method, anchors, ids, kind)
    cache = cache if carry is None else carry(cache)
    held = int(cache.get_seq_length())
    longer = torch.cat([ids, ids[:, :3]], dim=1)
    start = 19 if method in GENERATED else 5
    said = rf"made under {type(method).__name__}\(.*from token {start} on.*not steered"
    for call in (
        lambda: model.generate(longer, past_key_values=cache, max_new_tokens=3),
        lambda: model(ids[:, :1], past_key_values=cache),
        lambda: Steered(model, method=method).generate(
            longer, past_key_values=cache, max_new_tokens=3
        ),
    ):
        with pytest.raises(RuntimeError, match=said):
            call()
    assert int(cache.get_seq_length()) == held
    with method.applied_to(model, None), pytest.raises(RuntimeError, match=said):
        model.generate(longer, past_key_values=cache, max_new_tokens=3)
    # Where it was made it goes on, and gives what no cache gives.
    with torch.no_grad(), method.applied_to(model, anchors):
        logits = model(ids[:, :1], past_key_values=cache).logits[:, -1]
    expected = Oracle(model, method, anchors)(torch.cat([ids, ids[:, :1]], dim=1))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("method", EVERY, ids=named)
def test_a_cache_made_by_the_model_itself_is_known_too(method):
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    with torch.no_grad(), method.applied_to(model, anchors):
        cache = returned_cache(model(ids))
    with pytest.raises(RuntimeError, match="not steered"):
        model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("made", METHODS, ids=named)
@pytest.mark.parametrize("used", METHODS, ids=named)
def test_another_steering_refuses_a_steered_cache(made, used):
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    cache = steered_cache(model, made, anchors, ids)
    with torch.no_grad(), used.applied_to(model, anchors):
        if made == used:
            model(ids[:, :1], past_key_values=cache)
        else:
            with pytest.raises(ValueError, match=rf"made under {type(made).__name__}\(.*mix both"):
                model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("method", METHODS, ids=named)
def test_other_anchors_refuse_a_steered_cache(method):
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    cache = steered_cache(model, method, anchors, ids)
    other = anchors.clone()
    other[0, 7] = True
    with (
        method.applied_to(model, other),
        pytest.raises(ValueError, match=r"with 2 anchored .*with 3 anchored .*mix both"),
    ):
        model.generate(torch.cat([ids, ids[:, :2]], dim=1), past_key_values=cache, max_new_tokens=2)


def test_another_bias_refuses_and_another_strength_does_not():
    """Both branches of SPA are the same whatever their blend."""
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    cache = steered_cache(model, AttentionBias(2.0), anchors, ids)
    with (
        AttentionBias(2.5).applied_to(model, anchors),
        pytest.raises(ValueError, match=r"bias=2\.0.*bias=2\.5"),
    ):
        model(ids[:, :1], past_key_values=cache)
    cache = steered_cache(model, SPA(1.4), anchors, ids)
    with torch.no_grad(), SPA(3.0).applied_to(model, anchors):
        logits = model(ids[:, :1], past_key_values=cache).logits[:, -1]
    expected = Oracle(model, SPA(3.0), anchors)(torch.cat([ids, ids[:, :1]], dim=1))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_cache_that_no_steering_has_changed_serves_any_model():
    """Before the first anchor, above the last layer, after a cut, a reset, or by permission."""
    model, inputs = tiny_model("Llama"), prompts([20], [[8, 12]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    plain = model(ids).logits[:, -1]
    ways = {
        "prefix": lambda cache: None,
        "cut": lambda cache: cache.crop(-11),
        "last layer": lambda cache: None,
        "reset": lambda cache: cache.reset(),
        "permission": lambda cache: setattr(cache, "steering", None),
    }
    for way, act in ways.items():
        method = AttentionBias(3.0, layers=[-1]) if way == "last layer" else AttentionBias(3.0)
        length = 8 if way == "prefix" else 19
        kind = "static" if way == "reset" else "dynamic"
        cache = steered_cache(model, method, anchors, ids[:, :length], kind)
        act(cache)
        assert isinstance(cache, SteeredCache)
        held = int(cache.get_seq_length())
        with torch.no_grad():
            logits = model(ids[:, held:], past_key_values=cache).logits[:, -1]
        if way == "permission":
            assert not torch.allclose(logits, plain, atol=1e-3)
        else:
            torch.testing.assert_close(logits, plain, atol=1e-5, rtol=0)


def test_rows_of_beams_share_their_prompts_anchors():
    """A cache of one row for each beam belongs to the steering of the prompts' rows."""
    model, inputs = tiny_model("Llama"), prompts(**BATCH)
    anchors = inputs.pop("anchors")
    method, wide = AttentionBias(2.0), dict(num_beams=3, num_return_sequences=3)
    with method.applied_to(model, anchors):
        out = model.generate(
            **inputs, **wide, max_new_tokens=3, do_sample=False, return_dict_in_generate=True
        )
    cache, repeated = returned_cache(out), anchors.repeat_interleave(3, dim=0)
    with torch.no_grad(), method.applied_to(model, repeated):
        model(out.sequences[:, -1:], past_key_values=cache)
    wrong = repeated.clone()
    wrong[4, 21] = True
    with method.applied_to(model, wrong), pytest.raises(ValueError, match="mix both"):
        model(out.sequences[:, -1:], past_key_values=cache)


def test_what_is_no_cache_of_transformers_is_refused():
    class Own:
        layers = ()

        def get_seq_length(self):
            return 0

    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    with (
        AttentionBias(2.0).applied_to(model, inputs["anchors"]),
        pytest.raises(ValueError, match="the cache is a Own; steering needs one of transformers'"),
    ):
        model(inputs["input_ids"], past_key_values=Own())


def test_a_cache_that_holds_the_whole_prompt_is_refused():
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    cache = steered_cache(model, AttentionBias(2.0), anchors, ids)
    with AttentionBias(2.0).applied_to(model, anchors):
        with pytest.raises(ValueError, match=r"20 tokens and the cache holds 20 .*crop\(-1\)"):
            model.generate(ids, past_key_values=cache, max_new_tokens=2)
        cache.crop(-1)
        out = model.generate(ids, past_key_values=cache, **GREEDY, max_new_tokens=2)
    close_at_every_step(out, Oracle(model, AttentionBias(2.0), anchors), 20)
