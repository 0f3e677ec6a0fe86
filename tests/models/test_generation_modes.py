"""Every way of generating, step by step against passes without a cache."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    ExponentialDecayLengthPenalty,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from radar_core import CFG, SPA, AttentionBias, SecondPrompt, Steered, TargetMass
from tests.models.oracle import BATCH, Oracle, close_at_every_step
from tests.models.test_caches import METHODS, family_model, named, new_cache
from tests.models.tiny import prompts, tiny_model

LOGITS = dict(output_logits=True, return_dict_in_generate=True)
FIVE = pytest.mark.parametrize("method", METHODS, ids=named)


@pytest.fixture(scope="module")
def llama():
    return tiny_model("Llama")


@pytest.fixture
def inputs():
    return prompts(**BATCH)


def sample(oracle, ids, processors, steps):
    """Draw tokens as transformers does, from logits of passes without a cache."""
    for _ in range(steps):
        probabilities = processors(ids, oracle(ids)).softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, num_samples=1)], dim=1)
    return ids


@pytest.mark.smoke
@FIVE
def test_sampling_draws_the_tokens_of_a_cache_free_loop(llama, inputs, method):
    """Left-padded, three sequences for each prompt, the same seed."""
    anchors = inputs.pop("anchors")
    settings = dict(do_sample=True, temperature=0.7, top_k=30, top_p=0.9, max_new_tokens=8)
    with method.applied_to(llama, anchors):
        torch.manual_seed(3)
        out = llama.generate(**inputs, **settings, **LOGITS, num_return_sequences=3)
    oracle = Oracle(llama, method, anchors, inputs["attention_mask"])
    processors = LogitsProcessorList(
        [TemperatureLogitsWarper(0.7), TopKLogitsWarper(30), TopPLogitsWarper(0.9)]
    )
    torch.manual_seed(3)
    drawn = sample(oracle, inputs["input_ids"].repeat_interleave(3, dim=0), processors, 8)
    assert torch.equal(out.sequences, drawn)
    close_at_every_step(out, oracle, 23)


class Forbid(LogitsProcessor):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.token] = -torch.inf
        return scores


@FIVE
def test_processors_run_in_their_documented_order(llama, method):
    """Those of the settings, then the caller's own, then the warpers; all on steered logits."""
    inputs = prompts(lengths=[23, 23], anchored=BATCH["anchored"])
    anchors = inputs.pop("anchors")
    ids = inputs["input_ids"]
    settings = dict(
        repetition_penalty=1.3,
        no_repeat_ngram_size=2,
        bad_words_ids=[[7], [8, 9]],
        min_length=26,
        min_new_tokens=4,
        exponential_decay_length_penalty=(4, 1.1),
        suppress_tokens=[11, 12],
        temperature=0.8,
        top_k=40,
        top_p=0.95,
        min_p=0.01,
        eos_token_id=[5],
    )
    with method.applied_to(llama, anchors):
        torch.manual_seed(1)
        out = llama.generate(
            **inputs,
            **settings,
            **LOGITS,
            output_scores=True,
            do_sample=True,
            max_new_tokens=7,
            logits_processor=LogitsProcessorList([Forbid(13)]),
        )
    by_hand = LogitsProcessorList(
        [
            RepetitionPenaltyLogitsProcessor(1.3),
            NoRepeatNGramLogitsProcessor(2),
            NoBadWordsLogitsProcessor([[7], [8, 9]], torch.tensor([5])),
            MinLengthLogitsProcessor(26, torch.tensor([5])),
            MinNewTokensLengthLogitsProcessor(23, 4, torch.tensor([5])),
            ExponentialDecayLengthPenalty((4, 1.1), torch.tensor([5]), 23),
            SuppressTokensLogitsProcessor([11, 12]),
            Forbid(13),
            TemperatureLogitsWarper(0.8),
            TopKLogitsWarper(40),
            TopPLogitsWarper(0.95),
            MinPLogitsWarper(0.01),
        ]
    )
    oracle = Oracle(llama, method, anchors, inputs["attention_mask"])
    for step, scores in enumerate(out.scores):
        so_far = out.sequences[:, : ids.shape[1] + step]
        expected = by_hand(so_far, oracle(so_far))
        assert torch.equal(scores.isinf(), expected.isinf())
        torch.testing.assert_close(scores, expected, atol=3e-4, rtol=0)


class CacheFree(LogitsProcessor):
    """Replaces what beam search scores by the log-probabilities of passes without a cache."""

    def __init__(self, oracle):
        self.oracle = oracle

    def __call__(self, input_ids, scores):
        return self.oracle(input_ids).log_softmax(-1)


@pytest.mark.smoke
@FIVE
@pytest.mark.parametrize("kind", ["dynamic", "static", "chunks"])
def test_beams_equal_those_of_a_cache_free_search(llama, inputs, method, kind):
    anchors = inputs.pop("anchors")
    beams = dict(
        num_beams=4,
        num_return_sequences=2,
        length_penalty=0.5,
        do_sample=False,
        max_new_tokens=7,
        eos_token_id=[3, 9, 27],
        output_scores=True,
        return_dict_in_generate=True,
    )
    kinds = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "chunks": {"prefill_chunk_size": 6},
    }
    oracle = Oracle(llama, method, anchors, inputs["attention_mask"])
    expected = llama.generate(**inputs, **beams, logits_processor=[CacheFree(oracle)])
    with method.applied_to(llama, anchors):
        out = llama.generate(**inputs, **beams, **kinds[kind])
    assert torch.equal(out.sequences, expected.sequences)
    assert torch.equal(out.beam_indices, expected.beam_indices)
    torch.testing.assert_close(out.sequences_scores, expected.sequences_scores, atol=1e-4, rtol=0)


@FIVE
def test_beams_past_a_sliding_window(inputs, method):
    model = tiny_model("Mistral")
    anchors = inputs.pop("anchors")
    beams = dict(num_beams=3, do_sample=False, max_new_tokens=8)
    oracle = Oracle(model, method, anchors, inputs["attention_mask"])
    expected = model.generate(**inputs, **beams, logits_processor=[CacheFree(oracle)])
    with method.applied_to(model, anchors):
        assert torch.equal(model.generate(**inputs, **beams), expected)


def test_beams_that_sample(llama, inputs):
    anchors = inputs.pop("anchors")
    beams = dict(num_beams=3, do_sample=True, top_k=10, max_new_tokens=6)
    for method in (SPA([2.0, 0.5]), AttentionBias(3.0)):
        oracle = Oracle(llama, method, anchors, inputs["attention_mask"])
        torch.manual_seed(0)
        expected = llama.generate(**inputs, **beams, logits_processor=[CacheFree(oracle)])
        with method.applied_to(llama, anchors):
            torch.manual_seed(0)
            assert torch.equal(llama.generate(**inputs, **beams), expected)


class Collect(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens.append(value.flatten())

    def end(self):
        self.ended = True


class After(StoppingCriteria):
    """Stops each row at its own length."""

    def __init__(self, lengths):
        self.lengths = torch.tensor(lengths)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), input_ids.shape[1]) >= self.lengths


@FIVE
def test_stopping_and_padding(llama, inputs, method):
    """End tokens, criteria of the caller's and least lengths stop rows as without a cache."""
    anchors, ids = inputs.pop("anchors"), inputs["input_ids"]
    oracle = Oracle(llama, method, anchors, inputs["attention_mask"])
    free = ids
    for _ in range(8):
        free = torch.cat([free, oracle(free).argmax(-1, keepdim=True)], dim=1)
    end = int(free[0, 25])
    options = dict(do_sample=False, max_new_tokens=8)
    with method.applied_to(llama, anchors):
        plain = llama.generate(**inputs, **options)
        ended = llama.generate(**inputs, **options, eos_token_id=[end])
        least = llama.generate(**inputs, **options, eos_token_id=[end], min_new_tokens=8)
        own = llama.generate(
            **inputs, **options, eos_token_id=[96], stopping_criteria=[After([25, 27])]
        )
    assert torch.equal(plain, free)
    first = int((free[0, 23:] == end).nonzero()[0]) + 23
    assert torch.equal(ended[0, : first + 1], free[0, : first + 1])
    assert not ended[0, first + 1 :].any()
    assert not (least[:, 23:] == end).any() and least.shape[1] == 31
    assert torch.equal(own[0], torch.cat([free[0, :25], torch.zeros(2, dtype=torch.long)]))
    assert torch.equal(own[1], free[1, :27])


@FIVE
def test_streaming_and_length_limits(llama, method):
    inputs = prompts([20], [[5, 6]])
    anchors = inputs.pop("anchors")
    streamer = Collect()
    with method.applied_to(llama, anchors):
        out = llama.generate(**inputs, do_sample=False, max_length=26, streamer=streamer)
    assert out.shape[1] == 26 and streamer.ended
    assert torch.equal(torch.cat(streamer.tokens), out[0])


@FIVE
@pytest.mark.parametrize(
    "options",
    [
        dict(do_sample=False),
        dict(do_sample=True, top_k=5, num_return_sequences=2),
        dict(num_beams=3, num_return_sequences=2, do_sample=False, output_scores=True),
        dict(do_sample=False, cache_implementation="static", disable_compile=True),
    ],
    ids=["greedy", "sample", "beams", "static"],
)
def test_steered_generate_is_the_models_own_under_the_method(llama, inputs, method, options):
    anchors = inputs.pop("anchors")
    asked = dict(inputs, max_new_tokens=5, return_dict_in_generate=True, **options)
    torch.manual_seed(2)
    one = Steered(llama, method=method).generate(**asked, anchors=anchors)
    with method.applied_to(llama, anchors):
        torch.manual_seed(2)
        other = llama.generate(**asked)
    plain = llama.generate(**asked)
    assert type(one) is type(other) is type(plain)
    assert torch.equal(one.sequences, other.sequences)
    for name in ("scores", "sequences_scores", "beam_indices"):
        left, right = getattr(one, name, None), getattr(other, name, None)
        if name == "scores" and left is not None:
            assert len(left) == len(plain.scores)
            left, right = torch.stack(left), torch.stack(right)
        assert (left is None) == (right is None)
        assert left is None or torch.equal(left, right)


@pytest.mark.smoke
@FIVE
@pytest.mark.parametrize("kind", ["dynamic", "static", "chunks"])
def test_prompts_given_as_embeddings(llama, inputs, method, kind):
    anchors, ids = inputs.pop("anchors"), inputs["input_ids"]
    kinds = {
        "dynamic": {},
        "static": {"cache_implementation": "static", "disable_compile": True},
        "chunks": {},
    }
    options = dict(do_sample=False, max_new_tokens=5, **kinds[kind], **LOGITS)
    embedded = llama.get_input_embeddings()(ids).detach()
    with method.applied_to(llama, anchors):
        by_ids = llama.generate(**inputs, **options)
        out = llama.generate(
            inputs_embeds=embedded, attention_mask=inputs["attention_mask"], **options
        )
    assert torch.equal(by_ids.sequences[:, 23:], out.sequences)
    for one, other in zip(by_ids.logits, out.logits, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)
    with_steered = Steered(llama, method=method).generate(
        inputs_embeds=embedded,
        attention_mask=inputs["attention_mask"],
        anchors=anchors,
        **options,
    )
    assert torch.equal(with_steered.sequences, out.sequences)


# -- prompts of a batch, each its own --------------------------------------------------------------


@pytest.mark.parametrize("strength", [[1.0, 2.5], [0.0, -1.0], [3.0, 1.4]])
@pytest.mark.parametrize("beams", [1, 3])
def test_every_prompt_has_its_own_strength_and_anchors(llama, inputs, strength, beams):
    anchors = inputs.pop("anchors")
    method = SPA(strength)
    oracle = Oracle(llama, method, anchors, inputs["attention_mask"])
    options = dict(do_sample=False, max_new_tokens=6, num_beams=beams)
    processors = [CacheFree(oracle)] if beams > 1 else [Replace(oracle)]
    expected = llama.generate(**inputs, **options, logits_processor=processors)
    with method.applied_to(llama, anchors):
        assert torch.equal(llama.generate(**inputs, **options), expected)


class Replace(CacheFree):
    def __call__(self, input_ids, scores):
        return self.oracle(input_ids)


@pytest.mark.smoke
@pytest.mark.parametrize("queries", ["all", "generated"])
def test_groups_of_anchors_have_weights_of_their_own(llama, inputs, queries):
    """Factors on a bias: two groups, one pushed away, and another bias for every prompt."""
    anchors = inputs.pop("anchors").float()
    anchors[0, 12] = -1.5
    anchors[0, 20] = 0.5
    anchors[1] *= 0.25
    method = AttentionBias(2.0, queries=queries)
    with method.applied_to(llama, anchors):
        out = llama.generate(**inputs, do_sample=False, max_new_tokens=6, **LOGITS)
        wide = llama.generate(**inputs, do_sample=False, max_new_tokens=4, num_beams=3)
    oracle = Oracle(llama, method, anchors, inputs["attention_mask"])
    close_at_every_step(out, oracle, 23)
    beams = dict(do_sample=False, max_new_tokens=4, num_beams=3)
    assert torch.equal(
        wide, llama.generate(**inputs, **beams, logits_processor=[CacheFree(oracle)])
    )


@pytest.mark.parametrize("method", [SPA(1.4), TargetMass(0.3)])
def test_weights_of_groups_are_refused_where_they_mean_nothing(llama, inputs, method):
    anchors = inputs["anchors"] * 0.5
    said = "anchor a token or not; .*AttentionBias"
    with pytest.raises(ValueError, match=said), method.applied_to(llama, anchors):
        pass


def test_a_bias_for_every_prompt_is_given_by_the_anchors():
    with pytest.raises(ValueError, match=r"bias is \[1\.0, 2\.0\].*anchors \* factor"):
        AttentionBias([1.0, 2.0])


# -- assisted decoding -----------------------------------------------------------------------------


@FIVE
@pytest.mark.parametrize(
    "family", [pytest.param("Llama", marks=pytest.mark.smoke), "Mistral", "Gemma2-mixed"]
)
@pytest.mark.parametrize("way", ["lookup", "assistant", "twin"])
def test_assisted_decoding_keeps_only_what_the_steered_model_says(family, method, way):
    """The steered model checks unsteered candidates; "twin" guesses best, the other worst."""
    model, inputs = family_model(family), prompts([20], [[5, 6, 14]])
    ids, anchors = inputs["input_ids"], inputs["anchors"]
    ids[:, 10:] = ids[:, :10]
    options = {
        "lookup": dict(prompt_lookup_num_tokens=3),
        "assistant": dict(assistant_model=tiny_model("Llama", seed=4)),
        "twin": dict(assistant_model=family_model(family)),
    }[way]
    with method.applied_to(model, anchors):
        out = model.generate(ids, do_sample=False, max_new_tokens=10, **LOGITS, **options)
        own = model.generate(ids, do_sample=False, max_new_tokens=10)
    assert torch.equal(out.sequences, own)
    close_at_every_step(out, Oracle(model, method, anchors), 20)


@pytest.mark.parametrize("method", [SPA(1.4), AttentionBias(2.0)])
def test_assisted_sampling_follows_the_steered_distribution(llama, method):
    """Frequencies of the first token, over many draws."""
    inputs = prompts([20], [[5, 6, 14]])
    ids, anchors = inputs["input_ids"], inputs["anchors"]
    assistant = tiny_model("Llama", seed=4)
    settings = dict(do_sample=True, temperature=0.5, top_k=4, max_new_tokens=2)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.5), TopKLogitsWarper(4)])
    torch.manual_seed(0)
    counts = torch.zeros(97)
    draws = 100
    with method.applied_to(llama, anchors):
        for _ in range(draws):
            out = llama.generate(ids, **settings, assistant_model=assistant)
            counts[out[0, 20]] += 1
    expected = processors(ids, Oracle(llama, method, anchors)(ids)).softmax(-1)[0]
    error = 4 * (expected * (1 - expected) / draws).sqrt() + 1e-6
    assert bool(((counts / draws - expected).abs() <= error).all())


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [pytest.param(METHODS[0], marks=pytest.mark.smoke), *METHODS[1:]], ids=named
)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(penalty_alpha=0.6, top_k=4), "penalty_alpha=0.6 .*contrastive search"),
        (dict(dola_layers="high"), "dola_layers='high' .*DoLa"),
        (dict(force_words_ids=[[[4]]], num_beams=2), "force_words_ids.*constrained"),
        (dict(num_beam_groups=2, num_beams=4), "num_beam_groups=2 .*group beam"),
        (dict(assistant_early_exit=1), "assistant_early_exit=1 .*not steered"),
        (dict(use_mtp=True), "use_mtp=True .*not steered"),
        (dict(token_healing=True), "token_healing=True .*rewrites the prompt"),
        (dict(custom_generate="some/recipe", trust_remote_code=True), "recipe"),
        (dict(cache_implementation="paged"), "continuous batching .*left-padded"),
        (dict(guidance_scale=1.5), r"guidance_scale .*SPA\(strength=1\.5\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("where", ["arguments", "config", "model"])
def test_modes_that_steering_does_not_reach_are_refused_before_anything_runs(
    inputs, method, options, said, where
):
    model = tiny_model("Llama")
    anchors = inputs.pop("anchors")
    ran = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    config = {name: value for name, value in options.items() if name not in ARGUMENTS}
    if where == "config" and config:
        options = {"generation_config": GenerationConfig(**config, max_new_tokens=2)}
    elif where == "model" and config:
        for name, value in config.items():
            setattr(model.generation_config, name, value)
        options = {}
    for call in (
        lambda: model.generate(**inputs, **options),
        lambda: model.generate(inputs["input_ids"], attention_mask=None, **options),
    ):
        with method.applied_to(model, anchors), pytest.raises(ValueError, match=said):
            call()
    if "generation_config" not in options:
        options = {**options, "max_new_tokens": 2}
    with pytest.raises(ValueError, match=said):
        Steered(model, method=method).generate(**inputs, anchors=anchors, **options)
    assert not ran and not {"generate", "generate_batch"} & set(vars(model))


ARGUMENTS = ("custom_generate", "trust_remote_code")


@FIVE
def test_continuous_batching_is_refused(llama, inputs, method):
    anchors, rows = inputs["anchors"], inputs["input_ids"].tolist()
    with method.applied_to(llama, anchors):
        for call in (
            lambda: llama.generate_batch(rows),
            lambda: llama.init_continuous_batching(),
            lambda: llama.continuous_batching_context_manager().__enter__(),
        ):
            with pytest.raises(ValueError, match="continuous batching cannot be steered"):
                call()
    assert "init_continuous_batching" not in vars(llama)


@FIVE
def test_the_model_itself_is_no_assistant(llama, inputs, method):
    anchors = inputs.pop("anchors")
    with (
        method.applied_to(llama, anchors),
        pytest.raises(ValueError, match="assistant_model is the steered model itself"),
    ):
        llama.generate(**inputs, assistant_model=llama)


class Asking(LogitsProcessor):
    """Calls the model that generates with tokens of its own."""

    def __init__(self, model, ids, **options):
        self.model, self.ids, self.options = model, ids, options

    def __call__(self, input_ids, scores):
        self.model(self.ids, **self.options)
        return scores


@pytest.mark.parametrize("method", [*METHODS, CFG(1.5, [[3, 4, 5]])])
@pytest.mark.parametrize("other", ["longer", "as long", "shorter"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_another_prompt_while_generating_is_refused(llama, inputs, method, other, use_cache):
    """From a logits processor, say: it would be steered where this prompt's anchors are."""
    anchors = None if isinstance(method, SecondPrompt) else inputs["anchors"]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    tokens = {"longer": 30, "as long": 20, "shorter": 7}[other]
    asking = Asking(llama, torch.arange(3, 3 + tokens).repeat(2, 1), use_cache=use_cache)
    with (
        method.applied_to(llama, anchors),
        pytest.raises(ValueError, match="another prompt while generate runs"),
    ):
        llama.generate(ids, attention_mask=mask, max_new_tokens=2, logits_processor=[asking])


@pytest.mark.parametrize("method", [*METHODS, CFG(1.5, [[3, 4, 5]])])
def test_the_prompt_itself_may_be_run_while_generating(llama, inputs, method):
    anchors = None if isinstance(method, SecondPrompt) else inputs["anchors"]
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    asking = Asking(llama, ids, attention_mask=mask)
    options = dict(max_new_tokens=4, do_sample=False)
    with method.applied_to(llama, anchors):
        own = llama.generate(ids, attention_mask=mask, **options)
        asked = llama.generate(ids, attention_mask=mask, logits_processor=[asking], **options)
    assert torch.equal(own, asked)


def test_a_function_of_the_callers_own_may_generate(llama):
    def greedy(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        for _ in range(3):
            logits = model(input_ids).logits[:, -1]
            input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], dim=1)
        return input_ids

    inputs = prompts([20], [[5, 6]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    with AttentionBias(2.0).applied_to(llama, anchors), torch.no_grad():
        own = llama.generate(ids, max_new_tokens=3, do_sample=False, custom_generate=greedy)
        assert torch.equal(own, llama.generate(ids, max_new_tokens=3, do_sample=False))


@FIVE
def test_quantised_beams(method, inputs):
    """Both branches of quantised rows are reordered; transformers 5.17 reorders neither."""
    model = tiny_model("Qwen3")
    cache = new_cache("quantized", model)
    anchors = inputs.pop("anchors")
    beams = dict(num_beams=3, do_sample=False, max_new_tokens=7)
    oracle = Oracle(model, method, anchors, inputs["attention_mask"])
    expected = model.generate(**inputs, **beams, logits_processor=[CacheFree(oracle)])
    with method.applied_to(model, anchors):
        out = model.generate(**inputs, **beams, past_key_values=cache)
    assert torch.equal(out, expected)
