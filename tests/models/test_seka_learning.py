"""Learning from contrastive examples what to project keys on, on a real model."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from radar_core import PRISM, SEKA, AdaSEKA, AttentionBias, Contrast, Steered, attention_mass
from radar_core.methods import seka

EXAMPLES = [
    Contrast(
        "The budget is 40,000 euros. The hall is free in June.",
        "40,000 euros",
        "What is the budget?",
        "When is the hall free?",
    ),
    Contrast(
        "Ana leads the project. The deadline is the 3rd of May.",
        "3rd of May",
        "When is the deadline?",
        "Who leads the project?",
    ),
    Contrast(
        "The museum opens at nine. Tickets cost twelve dollars.",
        "twelve dollars",
        "How much is a ticket?",
        "When does the museum open?",
    ),
    Contrast(
        "The river is 80 km long. It rises in the Black Forest.",
        "the Black Forest",
        "Where does the river rise?",
        "How long is the river?",
    ),
    Contrast(
        "Mara plays the violin. Her brother Jonas studies law.",
        "the violin",
        "What does Mara play?",
        "What does Jonas study?",
    ),
    Contrast(
        "The server crashed on Monday. A full disk was the cause.",
        "A full disk",
        "Why did the server crash?",
        "When did the server crash?",
    ),
]
TEXT = (
    "Bob paints the fence. The train to Lyon leaves at half past six from platform nine. "
    "It rained all week. When does the train leave?"
)
ANCHOR = "The train to Lyon leaves at half past six"


@pytest.fixture(scope="module")
def learned(smollm2):
    return seka.learn(smollm2.model, smollm2.tokenizer, EXAMPLES)


def test_learned_directions_are_those_of_keys_computed_by_hand(smollm2, learned):
    """From hidden states through a layer's own norm and k_proj, as the paper's formulas have it."""
    model, tokenizer = smollm2.model, smollm2.tokenizer
    layer, head = 7, 1
    block, size = model.model.layers[layer], model.config.head_dim
    keys = {"neutral": [], "relevant": [], "irrelevant": []}
    for example in EXAMPLES:
        context, answer = example.context, example.answer
        questions = {
            "neutral": "",
            "relevant": example.relevant,
            "irrelevant": example.irrelevant,
        }
        for kind, question in questions.items():
            text = f"Context: {context}"
            text = f"Question: {question}\n{text}" if question else text
            encoded = tokenizer(text, return_offsets_mapping=True)
            start = text.index(answer)
            places = [
                place
                for place, (first, last) in enumerate(encoded["offset_mapping"])
                if last > start and first < start + len(answer)
            ]
            with torch.no_grad():
                ids = torch.tensor([encoded["input_ids"]])
                hidden = model(ids, output_hidden_states=True).hidden_states[layer]
                key = block.self_attn.k_proj(block.input_layernorm(hidden))[0, places]
            keys[kind].append(key[:, head * size : (head + 1) * size].double())
    neutral, relevant, irrelevant = (torch.cat(keys[kind]) for kind in keys)
    assert learned.tokens == len(neutral)
    moved = relevant - irrelevant
    mean = moved.norm(dim=1).mean()
    assert learned.mean_distance[layer, head] == pytest.approx(float(mean), rel=1e-4)
    frobenius = float(moved.norm() / len(moved))
    assert learned.frobenius_distance[layer, head] == pytest.approx(frobenius, rel=1e-4)
    for name, other in [("positive", relevant), ("negative", irrelevant), ("difference", moved)]:
        left, values, _ = torch.linalg.svd(neutral.T @ other / len(neutral))
        subspace = getattr(learned, name)
        torch.testing.assert_close(
            subspace.values[layer, head].double(), values, atol=1e-4 * float(values[0]), rtol=0
        )
        found = subspace.vectors[layer, head].double()
        agreement = (found[:, :3] * left[:, :3]).sum(0).abs()
        assert (agreement > 0.999).all(), name
        assert ((relevant.mean(0) @ found)[:3] > 0).all()


def test_learned_projections_move_attention_to_the_anchors(smollm2, learned):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    encoded = tokenizer(TEXT, return_offsets_mapping=True)
    start = TEXT.index(ANCHOR)
    end = start + len(ANCHOR)
    anchors = [[first < end and last > start for first, last in encoded["offset_mapping"]]]
    ids = torch.tensor([encoded["input_ids"]])
    before = attention_mass(model, ids, anchors)
    for method in (SEKA(learned), PRISM(learned), AdaSEKA(learned)):
        after = attention_mass(model, ids, anchors, method)
        assert after.mean() > 1.2 * before.mean(), method
    last = SEKA(learned, layers=range(-10, 0))
    after = attention_mass(model, ids, anchors, last)
    torch.testing.assert_close(after[:, :20], before[:, :20], atol=1e-5, rtol=0)


def test_a_reply_steered_by_learned_keys(smollm2, learned):
    steered = Steered(smollm2.model, smollm2.tokenizer, SEKA(learned))
    reply = steered.chat(TEXT, anchors=[ANCHOR], max_new_tokens=12)
    assert reply.text and reply.usage.anchor_tokens > 5


def test_progress_is_shown_only_if_it_takes_long(smollm2, monkeypatch, capsys):
    from radar_core.hooks import key_statistics

    def shown(patience, **options):
        monkeypatch.setattr(key_statistics, "_PATIENCE", patience)
        seka.learn(smollm2.model, smollm2.tokenizer, EXAMPLES[:2], layers=[3], **options)
        return capsys.readouterr().err

    assert "reading keys" in shown(0.0)
    assert not shown(60.0) and not shown(0.0, progress=False)


@pytest.mark.parametrize("chat", [False, True])
def test_learning_some_layers_only(smollm2, learned, chat):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    found = seka.learn(model, tokenizer, EXAMPLES[:2], layers=[-1, 3], chat=chat)
    assert found.layers == (3, 29) and 0 < found.tokens < learned.tokens
    plain = [dataclasses.astuple(example) for example in EXAMPLES[:2]]
    again = seka.learn(model, tokenizer, plain, layers=[3], chat=False)
    assert torch.allclose(found.mean_distance[:1], again.mean_distance) == (not chat)


def test_examples_that_teach_nothing_are_refused(smollm2):
    model, tokenizer = smollm2.model, smollm2.tokenizer
    for examples, says in [
        ([], "examples is empty"),
        ([("a", "b", "c")], "expected a Contrast or four texts"),
        ([Contrast("One. Two.", "Three", "?", "?")], "0 times"),
        ([Contrast("One one.", "one", "?", "?"), Contrast("a a", "a", "?", "?")], "2 times"),
        ([Contrast("One.", "", "?", "?")], "0 times"),
    ]:
        with pytest.raises(ValueError, match=says):
            seka.learn(model, tokenizer, examples)
    with (
        AttentionBias(1.0).applied_to(model, [[True, False]]),
        pytest.raises(RuntimeError, match="already steered"),
    ):
        seka.learn(model, tokenizer, EXAMPLES)
