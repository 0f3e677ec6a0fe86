"""What sentences get of a query's attention, and generation that goes on from the same cache."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicCache

from radar_core import CFG, SPA, AttentionBias, NoSteering, Steered, TargetMass
from radar_core.hooks.sentence_mass import Asked, PromptReader, unchanged_tokens
from tests.models.tiny import MIXED, SHAPE, eager_twin, refused_model, tiny_model

HOOKED = ["Llama", "Qwen2", "Qwen3", "Mistral", "GPT2", "OPT", "GPTNeoX", "Phi3", "Olmo2"]
WINDOWED = ["Gemma2", "Gemma3Text", "Qwen2", "Cohere2", "GptOss", "Llama4Text"]
CASES = [*((name, None) for name in HOOKED), *((name, MIXED[name]) for name in WINDOWED)]


def case_model(case):
    family, shape = case
    return tiny_model(family, shape=shape)


def tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 97, (count,), generator=generator).tolist()


def asked(prefix, query, tail):
    return Asked([*prefix, *query, *tail], len(prefix), len(prefix) + len(query))


PREFIX, TAIL = tokens(40, 1), tokens(3, 2)
QUERY, BLANK = tokens(6, 3), [95, 96]
# Sentences of several lengths with tokens of no sentence between them.
SENTENCES = torch.tensor([-1] * 3 + [0] * 9 + [1] + [-1] + [2] * 20 + [3] * 4 + [-1] * 2)


def sentence_of(prompt):
    return torch.cat([SENTENCES, torch.full((len(prompt.input_ids) - 40,), -1)])


def expected(model, prompt, sentences, count):
    """Find every sentence's peaks in the eager model's own attention: [layers, 2, heads, count]."""
    twin = eager_twin(model)
    with torch.no_grad():
        seen = twin(torch.tensor([prompt.input_ids]), output_attentions=True).attentions
    weights = torch.stack([layer[0].float() for layer in seen])
    mass = torch.stack([weights[..., sentences == n].sum(-1) for n in range(count)], dim=-1)
    return peaks(mass, prompt.first, prompt.last)


def peaks(mass, first, last):
    """Take the largest of [layers, heads, tokens, count] over query and rest."""
    query, rest = mass[:, :, first:last].amax(2), mass[:, :, last:]
    rest = rest.amax(2) if rest.shape[2] else torch.zeros_like(query)
    return torch.stack([query, rest], dim=1)


def read(reader, prompt, blank, sentences=None, count=4):
    layers = range(reader.model.config.num_hidden_layers)
    sentences = sentence_of(prompt) if sentences is None else sentences
    return reader.sentence_peaks(prompt, blank, sentences, count, layers)


def count_tokens(model):
    lengths = []

    def note(module, args, kwargs):
        lengths.append(kwargs["input_ids"].shape[1])

    return lengths, model.register_forward_pre_hook(note, with_kwargs=True)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0] + "-mixed" * bool(case[1]))
def test_equals_the_eager_models_attention(case):
    model = case_model(case)
    real, blank = asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL)
    mass, nothing = read(PromptReader(model), real, blank)
    assert 1e-3 < float(mass.max()) <= 1 and not torch.allclose(mass, nothing, atol=1e-3)
    for found, prompt in ((mass, real), (nothing, blank)):
        oracle = expected(model, prompt, sentence_of(prompt), 4)
        torch.testing.assert_close(found, oracle, atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", [("Llama", None), ("Mistral", None), ("Gemma2", MIXED["Gemma2"])])
def test_of_a_growing_conversation_only_what_is_new_is_read(case):
    model = case_model(case)
    reader = PromptReader(model)
    read(reader, asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL))
    longer, query = [*PREFIX, *tokens(11, 4)], tokens(5, 5)
    real, blank = asked(longer, query, TAIL), asked(longer, BLANK, TAIL)
    lengths, handle = count_tokens(model)
    mass, nothing = read(reader, real, blank)
    handle.remove()
    # The token that was read last is run again first, and the one that is now the last at the end.
    assert lengths == [1, 11, len(BLANK) + len(TAIL), len(query) + len(TAIL), 1]
    torch.testing.assert_close(mass, expected(model, real, sentence_of(real), 4), atol=1e-5, rtol=0)
    fresh, without = read(PromptReader(model), real, blank)
    torch.testing.assert_close(mass, fresh, atol=1e-6, rtol=0)
    torch.testing.assert_close(nothing, without, atol=1e-6, rtol=0)
    # One that parts in the middle is read from there.
    other = [*PREFIX[:17], *tokens(30, 6)]
    real, blank = asked(other, QUERY, TAIL), asked(other, BLANK, TAIL)
    lengths, handle = count_tokens(model)
    mass, _ = read(reader, real, blank)
    handle.remove()
    assert lengths[:2] == [1, 30]
    torch.testing.assert_close(mass, expected(model, real, sentence_of(real), 4), atol=1e-5, rtol=0)


def test_a_query_longer_than_is_measured_at_a_time(monkeypatch):
    monkeypatch.setattr("radar_core.hooks.sentence_mass.MEASURED", 4)
    model = case_model(("Mistral", None))
    real, blank = asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, [])
    mass, nothing = read(PromptReader(model), real, blank)
    for found, prompt in ((mass, real), (nothing, blank)):
        oracle = expected(model, prompt, sentence_of(prompt), 4)
        torch.testing.assert_close(found, oracle, atol=1e-5, rtol=0)
    assert not nothing[:, 1].any()


def test_queries_that_change_the_token_before_them():
    """As where a tokenizer merges a blank with the query's first word, but not with another's."""
    model = tiny_model("Llama")
    real, blank = asked(PREFIX, QUERY, TAIL), asked([*PREFIX[:-2], 94, 93], BLANK, TAIL)
    mass, nothing = read(PromptReader(model), real, blank)
    for found, prompt in ((mass, real), (nothing, blank)):
        oracle = expected(model, prompt, sentence_of(prompt), 4)
        torch.testing.assert_close(found, oracle, atol=1e-5, rtol=0)


def test_a_prompt_of_several_passes(monkeypatch):
    monkeypatch.setattr("radar_core.hooks.sentence_mass.CHUNK", 7)
    model = case_model(("Mistral", None))
    real, blank = asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL)
    lengths, handle = count_tokens(model)
    mass, _ = read(PromptReader(model), real, blank)
    handle.remove()
    assert lengths[:6] == [7] * 5 + [5]
    torch.testing.assert_close(mass, expected(model, real, sentence_of(real), 4), atol=1e-5, rtol=0)


def test_changed_weights_are_read_anew():
    model = tiny_model("Llama")
    reader = PromptReader(model)
    real, blank = asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL)
    read(reader, real, blank)
    assert reader.cache_for(real.input_ids) is not None
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(-1)
    assert reader.cache_for(real.input_ids) is None
    mass, _ = read(reader, real, blank)
    torch.testing.assert_close(mass, expected(model, real, sentence_of(real), 4), atol=1e-5, rtol=0)


def raw(tensor):
    """A tensor's memory as numpy sees it: what is written there, torch does not notice."""
    return tensor.detach().numpy()


class Doubled(torch.nn.Module):
    """A block in another's place that has its very weights."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, hidden):
        return 2 * self.block(hidden)


def steered_prompt(module, args, output):
    """As steering of activations that leaves single tokens alone, those of a reply."""
    return output * 1.5 if output.shape[1] > 1 else output


def changed_forward(model):
    mlp = model.model.layers[0].mlp
    plain = mlp.forward
    mlp.forward = lambda hidden: steered_prompt(mlp, (), plain(hidden))


CHANGES = {
    "data": lambda model: model.model.layers[0].mlp.down_proj.weight.data.mul_(1.6),
    "a little": lambda model: model.model.layers[1].mlp.down_proj.weight.data.mul_(1.02),
    "the last values": lambda model: model.model.layers[-1].self_attn.v_proj.weight.data.mul_(1.1),
    "numpy": lambda model: raw(model.model.layers[1].self_attn.q_proj.weight).__imul__(-1),
    "one embedding": lambda model: model.model.embed_tokens.weight.data[PREFIX[7]].mul_(2),
    "buffer": lambda model: raw(model.model.rotary_emb.inv_freq).__imul__(0.5),
    "hook": lambda model: model.model.layers[0].mlp.register_forward_hook(steered_prompt),
    "module": lambda model: setattr(
        model.model.layers[0], "mlp", Doubled(model.model.layers[0].mlp)
    ),
    "forward": changed_forward,
    "scaling": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 1.0),
}


@pytest.mark.parametrize("again", ["reply", "selection"])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_is_taken_over_once_the_model_has_changed(change, again):
    model = tiny_model("Llama")
    reader = PromptReader(model)
    real, blank = asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL)
    read(reader, real, blank)
    CHANGES[change](model)
    if again == "reply":
        assert reader.cache_for(real.input_ids) is None
        return
    found, _ = read(reader, real, blank)
    fresh, _ = read(PromptReader(model), real, blank)
    assert torch.equal(found, fresh)
    assert reader.cache_for(real.input_ids) is not None


def test_nothing_is_taken_over_once_a_hook_is_off():
    model = tiny_model("Llama")
    handle = model.model.layers[0].mlp.register_forward_hook(steered_prompt)
    reader = PromptReader(model)
    real = asked(PREFIX, QUERY, TAIL)
    read(reader, real, asked(PREFIX, BLANK, TAIL))
    assert reader.cache_for(real.input_ids) is not None
    handle.remove()
    assert reader.cache_for(real.input_ids) is None


def test_adapters_that_are_scaled_are_read_anew():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(
        tiny_model("Llama"),
        peft.LoraConfig(target_modules=["down_proj"], init_lora_weights=False),
    ).eval()
    reader = PromptReader(model)
    real = asked(PREFIX, QUERY, TAIL)
    read(reader, real, asked(PREFIX, BLANK, TAIL))
    assert reader.cache_for(real.input_ids) is not None
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 1.01
    assert reader.cache_for(real.input_ids) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0] + "-mixed" * bool(case[1]))
def test_an_unchanged_model_is_never_taken_for_a_changed_one(case, dtype):
    model = case_model(case).to(dtype)
    reader = PromptReader(model)
    longer = [*PREFIX, *tokens(60, 20)]
    for length in (40, 47, 61, 100):
        sentences = torch.full((length + len(QUERY) + len(TAIL),), -1)
        sentences[:40] = SENTENCES
        real, blank = (asked(longer[:length], query, TAIL) for query in (QUERY, BLANK))
        lengths, handle = count_tokens(model)
        read(reader, real, blank, sentences)
        handle.remove()
        assert max(lengths) <= 40
        threads = torch.get_num_threads()
        torch.set_num_threads(2 if threads == 1 else 1)
        try:
            assert reader.cache_for(real.input_ids).get_seq_length() == length + 8
            assert reader.cache_for(real.input_ids, 20).get_seq_length() == 20
        finally:
            torch.set_num_threads(threads)


def test_what_may_have_changed_is_not_run_while_it_is_steered():
    model = tiny_model("Llama")
    reader = PromptReader(model)
    real = asked(PREFIX, QUERY, TAIL)
    read(reader, real, asked(PREFIX, BLANK, TAIL))
    with NoSteering().applied_to(model):
        with pytest.raises(RuntimeError, match="already steered"):
            reader.cache_for(real.input_ids)
        assert reader.cache_for([96, 1, 2]) is None  # nothing is shared
    assert reader.cache_for(real.input_ids) is not None


def test_more_than_8192_sentences():
    shape = SHAPE | {"head_dim": 16, "num_hidden_layers": 1, "max_position_embeddings": 16384}
    model = tiny_model("Llama", shape=shape)
    prefix = tokens(9000, 7)
    real, blank = asked(prefix, QUERY, []), asked(prefix, BLANK, [])
    sentences = torch.cat([torch.arange(9000), torch.full((6,), -1)])
    mass, _ = read(PromptReader(model), real, blank, sentences, 9000)
    twin, cache = eager_twin(model), DynamicCache()
    with torch.no_grad():
        model(torch.tensor([prefix]), past_key_values=cache, logits_to_keep=1)
        seen = twin(torch.tensor([QUERY]), past_key_values=cache, output_attentions=True)
    oracle = peaks(seen.attentions[0][None, 0, :, :, :9000], 0, 6)
    torch.testing.assert_close(mass, oracle, atol=1e-5, rtol=0)


def test_bfloat16():
    model = tiny_model("Qwen2").to(torch.bfloat16)
    real, blank = asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL)
    mass, _ = read(PromptReader(model), real, blank)
    assert mass.dtype == torch.float32
    oracle = expected(model, real, sentence_of(real), 4)
    torch.testing.assert_close(mass, oracle, atol=5e-2, rtol=0)


def test_the_model_is_left_as_it_was():
    model = tiny_model("Llama")
    ids = torch.tensor([PREFIX])
    with torch.no_grad():
        before = model(ids).logits
        reader = PromptReader(model)
        read(reader, asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL))
        assert torch.equal(model(ids).logits, before)
        given = reader.cache_for([*PREFIX, 1])
        assert type(given) is DynamicCache and given.get_seq_length() == 40
        whole = reader.cache_for([*PREFIX, *QUERY, *TAIL])
        assert whole.get_seq_length() == 48  # the last token is left to run
        model(torch.tensor([[1, 2]]), past_key_values=given)  # no steering has marked it


# -- what is refused -------------------------------------------------------------------------------


def test_models_that_cannot_be_read_so_are_refused():
    real, blank = asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL)
    for family, why in (("Falcon", "AttentionInterface"), ("Mamba", "recurrent state")):
        with pytest.raises(ValueError, match=why):
            read(PromptReader(refused_model(family)), real, blank)
    config = transformers.Lfm2Config(
        **{**SHAPE, "num_hidden_layers": 2}, layer_types=["conv", "full_attention"]
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ValueError, match="'conv', whose states cannot be cut back"):
        read(PromptReader(model), real, blank)
    training = tiny_model("Llama").train()
    with pytest.raises(RuntimeError, match="training mode"):
        read(PromptReader(training), real, blank)


def test_prompts_that_cannot_be_measured_are_refused():
    reader = PromptReader(tiny_model("Llama"))
    real, blank = asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL)
    behind = sentence_of(real)
    behind[-1] = 3
    with pytest.raises(ValueError, match="sentence 3 does not lie before the query"):
        read(reader, real, blank, behind)
    long = tokens(300, 8)
    real, blank = asked(long, QUERY, TAIL), asked(long, BLANK, TAIL)
    with pytest.raises(ValueError, match="prompt has 309 tokens, but the model's context holds"):
        read(reader, real, blank)


def test_a_failed_pass_leaves_nothing_behind():
    model = tiny_model("Llama")
    reader = PromptReader(model)
    real, blank = asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL)
    mass, _ = read(reader, real, blank)

    def fail(*_):
        raise KeyboardInterrupt

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    other = [*PREFIX[:17], *tokens(23, 9)]
    with pytest.raises(KeyboardInterrupt):
        read(reader, asked(other, QUERY, TAIL), asked(other, BLANK, TAIL))
    handle.remove()
    assert reader.cache_for(real.input_ids) is None
    assert torch.equal(read(reader, real, blank)[0], mass)


def test_threads_take_turns_and_a_steered_model_is_refused():
    model = tiny_model("Llama")
    reader = PromptReader(model)
    prompts = [asked(tokens(40, seed), QUERY, TAIL) for seed in range(10, 16)]
    blanks = [asked(tokens(40, seed), BLANK, TAIL) for seed in range(10, 16)]
    alone = [read(PromptReader(model), *pair)[0] for pair in zip(prompts, blanks, strict=True)]
    found = [None] * 6

    def work(place):
        found[place] = read(reader, prompts[place], blanks[place])[0]

    threads = [threading.Thread(target=work, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)
    with NoSteering().applied_to(model), pytest.raises(RuntimeError, match="already steered"):
        read(reader, prompts[0], blanks[0])


# -- generation goes on from what was read ---------------------------------------------------------

PROMPT = [*PREFIX, *QUERY, *TAIL]
METHODS = {
    "bias": (AttentionBias(2.0, queries="generated"), 48),
    "target": (TargetMass(0.4, queries="generated"), 48),
    "last layer": (AttentionBias(2.0, layers=[-1]), 48),
    "direct": (SPA(2.0, branch="direct"), 48),
    "off": (AttentionBias(0.0), 48),
    "all queries": (AttentionBias(2.0), 20),
    "spa": (SPA(2.0), 20),
}
GOING_ON = [("Llama", None), ("Mistral", None), ("Gemma2", MIXED["Gemma2"])]


def anchors():
    marked = torch.zeros(1, len(PROMPT), dtype=torch.bool)
    marked[0, 20:27] = True
    return marked


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("case", GOING_ON, ids=lambda case: case[0])
def test_generation_from_what_was_read_equals_generation_anew(case, name):
    model = case_model(case)
    method, usable = METHODS[name]
    reader = PromptReader(model)
    read(reader, asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL))
    taken = unchanged_tokens(model, method, anchors(), {})
    assert taken == usable
    options = dict(
        max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    steered, ids = Steered(model, method=method), torch.tensor([PROMPT])
    fresh = steered.generate(ids, anchors=anchors(), **options)
    for _ in range(2):  # what is given is a copy: it serves as often as it is asked for
        cache = reader.cache_for(PROMPT, taken)
        assert cache.get_seq_length() == usable
        lengths, handle = count_tokens(model)
        out = steered.generate(ids, anchors=anchors(), past_key_values=cache, **options)
        handle.remove()
        assert lengths[0] == len(PROMPT) - usable
        assert torch.equal(out.sequences, fresh.sequences)
        for one, other in zip(out.logits, fresh.logits, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
    # And what it said leaves no trace in what is remembered.
    again, _ = read(reader, asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL))
    first, _ = read(PromptReader(model), asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL))
    torch.testing.assert_close(again, first, atol=1e-6, rtol=0)


def test_a_cache_made_under_steering_keeps_its_mark():
    """A reply under a bias on all queries marks the cache, although it began unsteered."""
    model = tiny_model("Llama")
    reader = PromptReader(model)
    read(reader, asked(PREFIX, QUERY, TAIL), asked(PREFIX, BLANK, TAIL))
    cache = reader.cache_for(PROMPT, 20)
    Steered(model, method=AttentionBias(2.0)).generate(
        torch.tensor([PROMPT]), anchors=anchors(), past_key_values=cache, max_new_tokens=2
    )
    with torch.no_grad(), pytest.raises(RuntimeError, match="made under AttentionBias"):
        model(torch.tensor([[5]]), past_key_values=cache)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"use_cache": False}, "use_cache=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"past_key_values": DynamicCache()}, "another cache"),
    ],
)
def test_where_a_cache_cannot_be_given_it_is_said_once(arguments, reason, caplog, monkeypatch):
    monkeypatch.setattr("radar_core.hooks.sentence_mass._logged", set())
    model = tiny_model("Llama")
    with caplog.at_level("INFO", logger="radar_core"):
        for _ in range(2):
            taken = unchanged_tokens(model, METHODS["bias"][0], anchors(), arguments)
            assert taken == 0
    assert len(caplog.messages) == 1 and reason in caplog.messages[0]


def test_a_second_prompt_takes_no_cache():
    assert unchanged_tokens(tiny_model("Llama"), CFG(1.5), anchors(), {}) == 0
