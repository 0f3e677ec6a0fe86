"""Steered.chat and Steered.generate: text in, steered text out."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import TextIteratorStreamer

from radar_core import SPA, Anchor, AttentionBias, Prompt, Steered, TargetMass, attention_mass
from tests.models.tiny import prompts, tiny_model

TEXT = "Ana: the budget is 40,000 euros. Ben: the venue holds 300 people. What is the budget?"
ANCHOR = "the budget is 40,000 euros."
MESSAGES = [{"role": "user", "content": TEXT}]


@pytest.fixture
def steered(smollm2):
    return Steered(smollm2.model, smollm2.tokenizer, AttentionBias(2.0))


def test_chat_answers_and_accounts_for_itself(steered):
    reply = steered.chat(MESSAGES, anchors=[ANCHOR], max_new_tokens=12)
    ids = steered.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=True
    )["input_ids"]
    assert "40,000" in reply.text and "<|" not in reply.text
    assert reply.usage.prompt_tokens == len(ids)
    assert 0 < reply.usage.completion_tokens <= 12
    assert [anchor.text for anchor in reply.anchors] == [ANCHOR]
    assert reply.usage.anchor_tokens == len(reply.anchors[0].tokens)
    covered = steered.tokenizer.decode([ids[token] for token in reply.anchors[0].tokens])
    assert covered.strip() == ANCHOR


def test_token_ids_are_those_of_the_unsteered_prompt(steered):
    batch = steered.prepare([MESSAGES], [[ANCHOR]])
    plain = steered.tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert torch.equal(batch["input_ids"], plain["input_ids"])


def test_without_anchors_a_reply_is_the_models_own(steered):
    batch = steered.prepare([MESSAGES], [[]])
    batch.pop("anchors")
    options = dict(max_new_tokens=8, do_sample=False)
    own = steered.model.generate(**batch, **options)
    assert torch.equal(own, steered.generate(**batch, **options))
    text = steered.tokenizer.decode(own[0, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    assert steered.chat(MESSAGES, **options).text == text


def test_strength_one_is_the_models_own_reply(smollm2):
    batch = Steered(smollm2.model, smollm2.tokenizer).prepare([MESSAGES], [[ANCHOR]])
    options = dict(
        max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    ours = Steered(smollm2.model, method=SPA(1.0)).generate(**batch, **options)
    batch.pop("anchors")
    own = smollm2.model.generate(**batch, **options)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, own.logits, strict=True))


def test_stop_strings_and_sampling(smollm2):
    spa = Steered(smollm2.model, smollm2.tokenizer, SPA(1.4))
    stopped = spa.chat(
        MESSAGES, [ANCHOR], max_new_tokens=40, do_sample=False, stop_strings=["euro"]
    )
    assert stopped.text.rstrip().endswith(("euro", "euros"))
    torch.manual_seed(0)
    first = spa.chat(MESSAGES, [ANCHOR], max_new_tokens=8, do_sample=True, temperature=1.5)
    torch.manual_seed(0)
    again = spa.chat(MESSAGES, [ANCHOR], max_new_tokens=8, do_sample=True, temperature=1.5)
    assert first.text == again.text


def test_streaming_from_a_thread(smollm2):
    spa = Steered(smollm2.model, smollm2.tokenizer, SPA(1.4))
    streamer = TextIteratorStreamer(
        smollm2.tokenizer, skip_prompt=True, skip_special_tokens=True, timeout=120
    )
    options = dict(max_new_tokens=10, do_sample=False)
    replies = []
    thread = threading.Thread(
        target=lambda: replies.append(spa.chat(MESSAGES, [ANCHOR], streamer=streamer, **options))
    )
    thread.start()
    streamed = "".join(streamer)
    thread.join()
    assert streamed == replies[0].text and len(streamed) > 0


def test_a_batch_of_conversations_is_left_padded(steered):
    longer = [
        *MESSAGES,
        {"role": "assistant", "content": "40,000."},
        {"role": "user", "content": "And the venue?"},
    ]
    batch = steered.prepare([MESSAGES, longer], [[ANCHOR], [Anchor(message=-1, text="venue")]])
    out = steered.generate(**batch, max_new_tokens=6, do_sample=False)
    assert (
        out.shape[0] == 2 and not batch["attention_mask"][0, 0] and batch["attention_mask"][0, -1]
    )
    alone = steered.prepare([MESSAGES], [[ANCHOR]])
    own = steered.generate(**alone, max_new_tokens=6, do_sample=False)
    assert torch.equal(out[0, -6:], own[0, -6:])


def test_attention_mass_rises_with_the_bias_and_reaches_a_target(steered):
    batch = steered.prepare([MESSAGES], [[ANCHOR]])
    measured = [
        attention_mass(steered.model, batch["input_ids"], batch["anchors"], method)
        for method in (
            None,
            AttentionBias(2.0, layers=[0]),
            TargetMass(0.5, mode="exact", layers=[0]),
        )
    ]
    plain, biased, target = (mass[0] for mass in measured)
    assert plain.shape == (30, 9) and bool(((plain >= 0) & (plain <= 1)).all())
    assert bool((biased[0] > plain[0]).all())
    torch.testing.assert_close(target[0], torch.full((9,), 0.5), atol=1e-5, rtol=0)
    own = steered.model
    own.set_attn_implementation("eager")
    try:
        weights = own(batch["input_ids"], output_attentions=True).attentions
    finally:
        own.set_attn_implementation("sdpa")
    shares = torch.stack([w[0, :, -1, batch["anchors"][0]].sum(-1) for w in weights])
    torch.testing.assert_close(plain, shares.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(anchors=["the budget is 50,000"]), "the budget is 40,000"),
        (dict(anchors=["budget"]), "2"),
        (dict(anchors=[ANCHOR], max_new_tokens=9000), "context"),
        (dict(anchors=[ANCHOR], max_new_tokens=0), "max_new_tokens"),
        (dict(anchors=[TEXT]), "everything"),
        (dict(anchors=ANCHOR), "list"),
        (dict(anchors=[ANCHOR], num_return_sequences=2), "use generate"),
    ],
)
def test_bad_anchors_and_lengths_say_what_to_do(steered, arguments, message):
    with pytest.raises(ValueError, match=message):
        steered.chat(MESSAGES, **arguments)


def test_a_str_is_one_message_of_the_user_and_given_anchors_replace_a_prompts(steered):
    short = dict(max_new_tokens=1)
    assert steered.chat(TEXT, **short).usage == steered.chat(MESSAGES, **short).usage
    prompt = Prompt(MESSAGES, [Anchor(text=ANCHOR)], None)
    own, other = steered.chat(prompt, **short), steered.chat(prompt, ["venue"], **short)
    assert [anchor.text for anchor in own.anchors] == [ANCHOR]
    assert [anchor.text for anchor in other.anchors] == ["venue"]


def test_prepare_takes_prompts_with_their_own_anchors(steered):
    prompt = Prompt(MESSAGES, [Anchor(text=ANCHOR)], None)
    own = steered.prepare([prompt, prompt])
    given = steered.prepare([MESSAGES, MESSAGES], [[ANCHOR], [ANCHOR]])
    assert all(torch.equal(own[name], given[name]) for name in given) and own["anchors"].any()


def test_several_conversations_in_chat_are_sent_to_prepare(steered):
    for several in ([MESSAGES, MESSAGES], [Prompt(MESSAGES, [], None)]):
        with pytest.raises(ValueError, match=r"steered\.prepare\(conversations"):
            steered.chat(several)


def test_swapped_arguments_are_noticed(smollm2):
    with pytest.raises(ValueError, match="look swapped"):
        Steered(smollm2.tokenizer, smollm2.model)


def test_a_factor_for_every_token_steers():
    """Also where every token has one, in `generate` as in a forward pass."""
    model, inputs = tiny_model("Llama"), prompts([20], [[5]])
    inputs.pop("anchors")
    factors = torch.linspace(0.1, 0.9, 20)[None]
    options = dict(max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
    generated = Steered(model, method=AttentionBias(2.0)).generate(
        **inputs, anchors=factors, **options
    )
    with AttentionBias(2.0).applied_to(model, factors):
        passed = model(**inputs).logits[:, -1]
    torch.testing.assert_close(generated.logits[0], passed, atol=1e-4, rtol=0)
    assert (passed - model(**inputs).logits[:, -1]).abs().max() > 0.01


def test_representations_name_the_model_and_the_method_and_no_state():
    model, inputs = tiny_model("Llama"), prompts([20], [[5]])
    assert repr(Steered(model)) == "Steered(LlamaForCausalLM, SPA(strength=1.4))"
    with SPA(2.0).applied_to(model, inputs["anchors"]) as steering:
        assert repr(steering) == "Steering(method=SPA(strength=2.0), active=True)"


def test_bad_inputs_say_what_to_do(smollm2, steered):
    with pytest.raises(ValueError, match="at least one message"):
        steered.chat([])
    with pytest.raises(ValueError, match="needs a tokenizer"):
        Steered(smollm2.model).chat(MESSAGES)
    with pytest.raises(ValueError, match="expected a steering method"):
        Steered(smollm2.model, smollm2.tokenizer, "spa")
    with pytest.raises(ValueError, match="needs input_ids"):
        steered.generate()


@pytest.mark.parametrize(
    "messages", [MESSAGES[0], 7, None, [TEXT], [{"role": "user", "content": "\ud83d"}]]
)
def test_other_messages_are_refused(steered, messages):
    with pytest.raises(ValueError, match="message"):
        steered.chat(messages, max_new_tokens=1)


def test_an_iterator_of_messages_is_as_good_as_a_list(steered):
    replies = [
        steered.chat(messages, [ANCHOR], max_new_tokens=2, do_sample=False)
        for messages in (MESSAGES, iter(MESSAGES))
    ]
    assert replies[0] == replies[1]


def test_arguments_of_the_wrong_type_are_refused():
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6, 11]])
    anchors = inputs.pop("anchors")
    for wrong in ("x", object(), [[True], [True, False]]):
        with pytest.raises(ValueError, match="makes no tensor"):
            Steered(model).generate(**inputs, anchors=wrong)
        with pytest.raises(ValueError, match="makes no tensor"), SPA(2.0).applied_to(model, wrong):
            pass
    for ids in ([[1, 2, 3]], torch.ones(20, dtype=torch.long)):
        with pytest.raises(ValueError, match="expected a tensor"):
            Steered(model).generate(ids, anchors=anchors)
    with (
        pytest.raises(ValueError, match=r"model\.compile"),
        SPA(2.0).applied_to(torch.compile(model), anchors),
    ):
        pass


def test_a_model_compiled_in_place_is_steered():
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6, 11]])
    anchors, ids = inputs["anchors"], inputs["input_ids"]
    with torch.no_grad():
        plain = model(ids).logits
        with AttentionBias(2.0).applied_to(model, anchors):
            expected = model(ids).logits
        model.compile(backend="eager")
        torch._dynamo.utils.counters.clear()
        torch.testing.assert_close(model(ids).logits, plain, atol=1e-4, rtol=0)
        with AttentionBias(2.0).applied_to(model, anchors):
            steered = model(ids).logits
        torch.testing.assert_close(model(ids).logits, plain, atol=1e-4, rtol=0)
        assert not torch._dynamo.utils.counters["graph_break"]
    torch.testing.assert_close(steered, expected, atol=1e-4, rtol=0)


def test_masks_that_do_not_fit_the_prompt_are_refused():
    model, inputs = tiny_model("Llama"), prompts([20, 13], [[5, 6, 11], [2, 3]])
    steered, anchors = Steered(model), inputs.pop("anchors")
    with pytest.raises(ValueError, match=r"expected \[2, 20\]"):
        steered.generate(**inputs, anchors=anchors[:, :-1])
    with pytest.raises(ValueError, match="pads out"):
        steered.generate(**inputs, anchors=anchors | (inputs["attention_mask"] == 0))
    with pytest.raises(ValueError, match="row 1 of anchors"):
        steered.generate(
            **inputs,
            anchors=anchors | inputs["attention_mask"].bool() & torch.tensor([[False], [True]]),
        )
    with pytest.raises(ValueError, match="nothing to measure"):
        attention_mass(model, inputs["input_ids"], torch.zeros_like(anchors))


def test_generate_returns_the_models_own_types():
    model, inputs = tiny_model("Llama"), prompts([20, 13], [[5, 6, 11], [2, 3]])
    anchors = inputs.pop("anchors")
    plain = model.generate(
        **inputs, max_new_tokens=4, return_dict_in_generate=True, output_scores=True
    )
    ours = Steered(model).generate(
        **inputs,
        anchors=anchors,
        max_new_tokens=4,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert type(ours) is type(plain) and ours.keys() == plain.keys()
    assert ours.scores[0].shape == plain.scores[0].shape
    by_position = Steered(model).generate(
        inputs["input_ids"],
        anchors=anchors,
        attention_mask=inputs["attention_mask"],
        max_new_tokens=4,
        do_sample=False,
    )
    assert torch.equal(by_position, ours.sequences)


def test_prompts_given_as_embeddings():
    model, inputs = tiny_model("Llama"), prompts([20], [[5, 6, 11]])
    anchors, steered = inputs.pop("anchors"), Steered(tiny_model("Llama"), method=SPA(2.0))
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    by_ids = steered.generate(**inputs, anchors=anchors, max_new_tokens=5, do_sample=False)
    by_embeds = steered.generate(
        inputs_embeds=embeds,
        attention_mask=inputs["attention_mask"],
        anchors=anchors,
        max_new_tokens=5,
        do_sample=False,
    )
    assert torch.equal(by_ids[:, 20:], by_embeds)
