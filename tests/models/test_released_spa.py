"""SPA(reference="anchoring-0.1.0") against the released package itself."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from radar_core import SPA, Guard, Steered
from radar_core.hooks.released_spa import find_placeholders, replace_anchors, second_prompt
from tests.models.tiny import tiny_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import anchoring

REFERENCE = "anchoring-0.1.0"
MESSAGES = "Ana: the budget is 40,000 euros. Ben: the hall holds 300 people. What is the budget?"
ANCHORS = ["the budget is 40,000 euros", "hall holds 300"]
OPTIONS = dict(do_sample=False, max_new_tokens=4, output_scores=True, return_dict_in_generate=True)


class TokenizerOfWords:
    """Words and placeholders of a tiny vocabulary, given back exactly as they were written."""

    mask_token = None
    pad_token_id = eos_token_id = mask_token_id = 0
    words = ("", " the", " hall", " MASK", "TOKEN", " MASKTOKEN", ".", " in", " June", " TOKEN")

    def __call__(self, text, **options):
        ids = []
        while text:
            longest = max((w for w in self.words if w and text.startswith(w)), key=len)
            ids.append(self.words.index(longest))
            text = text[len(longest) :]
        return type("Encoded", (), {"input_ids": ids})

    def encode(self, text, add_special_tokens=False):
        return self(text if text.startswith((" ", ".", "TOKEN")) else f" {text}").input_ids

    def decode(self, ids, **options):
        return "".join(self.words[token] for token in ids)


def by_package(model, tokenizer, inputs, method, **options):
    """Generate with the package's own processor on the second prompt that it makes of the text."""
    text = tokenizer.decode(inputs["input_ids"][0], clean_up_tokenization_spaces=False)
    placeholder = tokenizer.mask_token or "MASKTOKEN"
    _, replaced = anchoring.format_spa_input(text, ANCHORS, placeholder, whole_word_only=False)
    ids = tokenizer(replaced, add_special_tokens=False, return_tensors="pt").input_ids
    processor = anchoring.SPALogitsProcessor(
        aux_model=model,
        aux_input_ids=ids,
        mask_token=placeholder,
        strength=method.strength,
        modulated_by_prob=method.modulated,
        tokenizer=tokenizer,
        use_attention_mask=method.masking == "attention",
    )
    return model.generate(**inputs, **OPTIONS | options, logits_processor=[processor])


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (SPA(1.5, modulated=True, reference=REFERENCE), {}),
        (SPA(20.0, modulated=True, reference=REFERENCE), {"repetition_penalty": 1.3}),
        (SPA(1.4, reference=REFERENCE), {"min_new_tokens": 3}),
        (SPA(0.0, reference=REFERENCE), {}),
        (SPA(-3.0, masking="embedding", reference=REFERENCE), {"do_sample": True}),
    ],
)
def test_scores_are_the_packages_own(smollm2, method, options):
    steered = Steered(smollm2.model, smollm2.tokenizer, method)
    inputs = steered.prepare([[{"role": "user", "content": MESSAGES}]], [ANCHORS])
    torch.manual_seed(3)
    ours = steered.generate(**inputs, **OPTIONS | options)
    inputs.pop("anchors")
    torch.manual_seed(3)
    theirs = by_package(smollm2.model, smollm2.tokenizer, inputs, method, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    for one, other in zip(ours.scores, theirs.scores, strict=True):
        assert torch.equal(one, other)
    assert "generate" not in vars(smollm2.model)


def test_every_use_starts_anew_unlike_the_package(smollm2):
    steered = Steered(smollm2.model, smollm2.tokenizer, SPA(2.0, reference=REFERENCE))
    inputs = steered.prepare([[{"role": "user", "content": MESSAGES}]], [ANCHORS])
    first, second = (steered.generate(**inputs, **OPTIONS).scores for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_texts_are_replaced_as_the_package_does():
    random.seed(0)
    pieces = ["the hall", "hall", " ", "\n", "June", "<anchor>", "</anchor>", "a.b", "(", "MASK"]
    for _ in range(300):
        text = "".join(random.choices(pieces, k=12))
        anchors = random.sample(pieces[:2] + pieces[4:5] + ["a.b", "(", " ", ""], k=3)
        _, theirs = anchoring.format_spa_input(text, anchors, "[MASK]", whole_word_only=False)
        assert replace_anchors(text, anchors, "[MASK]") == theirs


def test_placeholders_are_found_as_the_package_does(capsys):
    random.seed(0)
    tokenizer = TokenizerOfWords()
    found = 0
    for placeholder in (" MASKTOKEN", "MASKTOKEN", " MASK", "."):
        for _ in range(100):
            ids = random.choices(range(1, 10), k=random.randint(1, 6))
            theirs = anchoring.create_masked_attention(
                torch.tensor([ids]), [placeholder], tokenizer
            )
            ours = find_placeholders(tokenizer, ids, placeholder)
            assert ours == (theirs[0] == 0).tolist()
            found += any(ours)
    assert found > 100


def test_the_second_prompt_has_one_placeholder_for_an_anchor(smollm2):
    tokenizer = smollm2.tokenizer
    ids = tokenizer("Ana says the hall is free.", return_tensors="pt").input_ids
    anchors = torch.zeros_like(ids, dtype=torch.bool)
    anchors[0, 3:5] = True
    second, hidden = second_prompt(tokenizer, ids, anchors)
    text = tokenizer.decode(second[0])
    assert text == "Ana says MASKTOKEN is free." and sum(hidden) > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(reference="anchoring"), "anchoring-0.1.0"),
        (dict(reference=REFERENCE, guard=Guard(0.9)), "no guard"),
        (dict(reference=REFERENCE, branch="direct"), "branch"),
        (dict(reference=REFERENCE, masking="embedding", mask_token_id=3), "mask_token_id"),
        (dict(reference=REFERENCE, strength=[1.2, 1.4]), "several prompts"),
    ],
)
def test_what_the_package_does_not_know_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SPA(**arguments)


def test_what_the_package_cannot_do_is_refused():
    model, tokenizer = tiny_model("Llama"), TokenizerOfWords()
    ids = torch.tensor([[1, 2, 7, 8, 6]])
    anchors = torch.tensor([[False, True, False, False, False]])
    method = SPA(2.0, reference=REFERENCE, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="no tokenizer"):
        Steered(model, method=SPA(2.0, reference=REFERENCE)).generate(ids, anchors=anchors)
    with pytest.raises(ValueError, match="single prompt"):
        Steered(model, method=method).generate(ids.repeat(2, 1), anchors=anchors.repeat(2, 1))
    with method.applied_to(model, anchors=anchors):
        for options, message in [
            (dict(num_beams=2), "num_beams"),
            (dict(num_return_sequences=2, do_sample=True), "num_return_sequences"),
            (dict(attention_mask=torch.tensor([[0, 1, 1, 1, 1]])), "padded"),
            (dict(guidance_scale=2.0), "guidance_scale"),
        ]:
            with pytest.raises(ValueError, match=message):
                model.generate(ids, max_new_tokens=2, **options)
        with pytest.raises(ValueError, match="inputs_embeds"):
            model.generate(
                inputs_embeds=model.get_input_embeddings()(ids).detach(), max_new_tokens=2
            )
        with pytest.raises(ValueError, match="without generate"):
            model(ids)
        with pytest.raises(ValueError, match="give back"):
            model.generate(torch.tensor([[3, 4, 7, 8, 6]]), max_new_tokens=2)
    model(ids)
