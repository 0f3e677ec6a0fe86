"""The recommended settings, on the embedded model: it chooses, is steered, and reads once."""

import pytest

from radar_core import AttentionBias, Steered, Topology, recommended_method, recommended_radar
from radar_core.embedded import load_encoder, load_model, load_tokenizer


@pytest.fixture(scope="module")
def smollm2():
    return load_model(), load_tokenizer()


def test_a_reply_goes_on_from_what_was_read_to_choose(smollm2):
    model, tokenizer = smollm2
    radar = recommended_radar(
        Topology.complete(["critic", "solver"]), model, tokenizer, load_encoder()
    )
    radar.observe(sender="critic", text="The hall is free in June. The budget is 40,000 euros.")
    prompt = radar.prompt(receiver="solver", query="What is our budget?")
    assert prompt.chosen.sentences[0].text == "The budget is 40,000 euros."
    assert len(prompt.anchors) == 2, "both sentences are among the best five, the query is not"
    read = []
    hook = model.register_forward_pre_hook(
        lambda module, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    steered = Steered(model, tokenizer, recommended_method())
    reply = steered.chat(prompt, max_new_tokens=4, do_sample=False)
    hook.remove()
    assert read[0] < reply.usage.prompt_tokens / 4, "the prompt had been read already"
    fresh = steered.chat(prompt.messages, prompt.anchors, max_new_tokens=4, do_sample=False)
    assert reply.text == fresh.text and reply.usage.anchor_tokens > 0


def test_the_method_leaves_the_prompts_keys_alone():
    assert recommended_method() == AttentionBias(1.0, queries="generated")
