"""Anchors cover exactly the tokens of their characters, whatever the template and the script."""

import re

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from radar_core.anchors import (
    Anchor,
    anchor_mask,
    anchor_spans,
    locate,
    render_chat,
    render_text,
)
from radar_core.embedded import load_tokenizer

SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<turn>", "</turn>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TRIMMING = (
    "<s>{% for m in messages %}<|start|>{{ m['role'] }}<|end|>\n\n{{ m['content'] | trim }}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
# The system message is written in front of the first user message, and both are trimmed together.
MERGING = (
    "<s>{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}"
    "{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<turn>{{ m['role'] }}\n"
    "{{ ((first if loop.first else '') + m['content']) | trim }}</turn>\n{% endfor %}"
)
REFUSING = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}" + CHATML
)
DROPPING = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m['role'] == 'user' %}"
)
# Reasoning in an assistant's message is left out.
UNTHINKING = CHATML.replace(
    "{{ m['content'] }}", "{{ m['content'].split('</think>')[-1].lstrip('\n') }}"
)
PICKY = "{% if 'ok' not in messages[0]['content'] %}{{ raise_exception('no') }}{% endif %}" + CHATML


def byte_level(template, normalizer=None, trim_offsets=False):
    """A byte-level BPE: every emoji and every CJK character is several tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    if normalizer:
        core.normalizer = normalizer
    core.train_from_iterator(
        ["The budget is 40,000 euros.", "You are a user, an assistant, a system. the the 😀"] * 3,
        trainers.BpeTrainer(
            vocab_size=360,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=SPECIAL,
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", chat_template=template)


def byte_fallback(template):
    """A sentencepiece-style BPE that falls back to bytes, as Gemma's and Llama 2's do."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.train_from_iterator(
        ["The▁budget▁is▁40,000▁euros."],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))],
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", chat_template=template)


TOKENIZERS = {
    "chatml": byte_level(CHATML),
    "trimming": byte_level(TRIMMING),
    "merging": byte_fallback(MERGING),
    "trimmed offsets": byte_level(CHATML, trim_offsets=True),
}
PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
# GPT-2's table: printable bytes stand for themselves, the others for the characters from 256 on.
BYTES = {chr(byte): byte for byte in PRINTABLE} | {
    chr(256 + place): byte for place, byte in enumerate(OTHERS)
}


def token_bytes(tokenizer, token_id):
    token = tokenizer.convert_ids_to_tokens(token_id)
    if token in SPECIAL:
        return token.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    if tokenizer.backend_tokenizer.model.byte_fallback:
        return token.replace("▁", " ").encode()
    return bytes(BYTES[character] for character in token)


def oracle_mask(tokenizer, rendered, spans):
    """Which tokens hold a byte of the spans, by adding up the bytes of all tokens."""
    pieces = [token_bytes(tokenizer, token_id) for token_id in rendered.input_ids]
    assert b"".join(pieces) == rendered.text.encode()
    marks = [False] * len(rendered.text.encode())
    for start, end in spans:
        first = len(rendered.text[:start].encode())
        for place in range(first, first + len(rendered.text[start:end].encode())):
            marks[place] = True
    mask, position = [], 0
    for piece in pieces:
        mask.append(any(marks[position : position + len(piece)]))
        position += len(piece)
    return mask


LATIN = ["The budget", " is 40,000", " ", "\n", "\t", "a", "naïve", "e\u0301", "\u00a0", "\u2028"]
OTHER = ["😀", "👩\u200d👩\u200d👧", "预算是", "。", "한국", "\U000f0000", "\U00100001"]
WORDS = st.sampled_from(LATIN + OTHER + SPECIAL)
TEXTS = st.one_of(
    st.lists(WORDS, min_size=1, max_size=8).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(list(TOKENIZERS)), st.lists(TEXTS, min_size=2, max_size=4), st.data())
def test_anchored_tokens_are_those_that_hold_a_byte_of_the_anchor(name, texts, data):
    tokenizer = TOKENIZERS[name]
    roles = (
        ["system", *["user", "assistant"] * 2]
        if data.draw(st.booleans())
        else (["user", "assistant"] * 2)
    )
    messages = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    assume(any(text.strip() for text in texts))
    rendered = render_chat(tokenizer, messages)
    assert rendered.text == tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert (
        rendered.input_ids
        == tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    )
    for index, text in enumerate(texts):
        span = rendered.content_spans[index]
        if span is None:
            assert not text.strip()
            continue
        kept = rendered.text[slice(*span)]
        assert kept.strip() == text.strip()
        lead = rendered.trimmed[index]
        assert text[lead : lead + len(kept)] == kept
    index = data.draw(st.sampled_from([i for i, text in enumerate(texts) if text.strip()]))
    start = data.draw(st.integers(0, len(texts[index]) - 1))
    end = data.draw(st.integers(start + 1, len(texts[index])))
    assume(texts[index][start:end].strip())
    (span,) = anchor_spans(rendered, [Anchor(index, start, end)])
    anchored = rendered.text[slice(*span)]
    assert anchored.strip() == texts[index][start:end].strip()
    expected = oracle_mask(tokenizer, rendered, [span])
    contents = oracle_mask(tokenizer, rendered, [s for s in rendered.content_spans if s])
    if expected == contents:
        with pytest.raises(ValueError, match="cover all"):
            anchor_mask(rendered, [span])
    else:
        assert anchor_mask(rendered, [span]) == expected


def chat(*pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def text_of(tokenizer, rendered, mask):
    ids = [token for token, anchored in zip(rendered.input_ids, mask, strict=True) if anchored]
    return tokenizer.decode(ids)


def test_the_embedded_models_tokenizer_marks_a_sentence_and_nothing_of_the_template():
    tokenizer = load_tokenizer()
    messages = chat(("user", "The sky is blue. The budget is 40,000 😀. What is the budget?"))
    rendered = render_chat(tokenizer, messages)
    spans = anchor_spans(rendered, ["The budget is 40,000 😀."])
    mask = anchor_mask(rendered, spans)
    assert text_of(tokenizer, rendered, mask) == " The budget is 40,000 😀."
    assert len(mask) == len(rendered) == len(rendered.input_ids)
    # The template's own default system message is no content.
    start = rendered.text.index("helpful")
    with pytest.raises(ValueError, match="template text only"):
        anchor_mask(rendered, [(start, start + 7)])
    with_template = anchor_mask(rendered, [(start, start + 7)], include_template=True)
    assert text_of(tokenizer, rendered, with_template).strip() == "helpful"
    assert anchor_mask(rendered, []) == [False] * len(rendered)


def test_every_token_of_an_emoji_counts():
    tokenizer = TOKENIZERS["chatml"]
    rendered = render_chat(tokenizer, chat(("user", "no 👩 yes")))
    mask = anchor_mask(rendered, anchor_spans(rendered, ["👩"]))
    assert sum(mask) > 1
    assert b"".join(
        token_bytes(tokenizer, token)
        for token, anchored in zip(rendered.input_ids, mask, strict=True)
        if anchored
    ).endswith("👩".encode())


def test_repeated_sentences_are_told_apart_by_message_and_by_occurrence():
    tokenizer = TOKENIZERS["chatml"]
    messages = chat(("user", "Yes. Yes. No."), ("assistant", "Maybe. Yes."), ("user", "So?"))
    rendered = render_chat(tokenizer, messages)
    with pytest.raises(
        ValueError, match=r"occurs 3 times.*occurrence 1: characters 5-9 of message 0"
    ):
        anchor_spans(rendered, ["Yes."])
    with pytest.raises(ValueError, match="occurs 2 times"):
        anchor_spans(rendered, [Anchor(0, text="Yes.")])
    with pytest.raises(ValueError, match="no occurrence 3"):
        anchor_spans(rendered, [Anchor(text="Yes.", occurrence=3)])
    begins = [match.start() for match in re.finditer("Yes", rendered.text)]
    anchors = [
        Anchor(text="Yes.", occurrence=1),
        Anchor(1, text="Yes."),
        Anchor(-2, 7, 11),
        Anchor(0, 0, 4),
        (begins[0], begins[0] + 4),
    ]
    spans = anchor_spans(rendered, anchors)
    assert spans == [
        (begin, begin + 4) for begin in (begins[1], begins[2], begins[2], *begins[:1] * 2)
    ]


def test_identical_messages_keep_their_own_places():
    messages = chat(("user", "ok"), ("assistant", "ok"), ("user", "ok"), ("assistant", "ok ok"))
    for tokenizer in (TOKENIZERS["chatml"], TOKENIZERS["trimming"]):
        rendered = render_chat(tokenizer, messages)
        headers = [match.start() for match in re.finditer(r"ok( ok)?(?=<)", rendered.text)]
        assert [span[0] for span in rendered.content_spans] == headers


def test_trimmed_blanks_shift_the_span_and_cannot_be_anchored():
    rendered = render_chat(
        TOKENIZERS["trimming"], chat(("user", "  \n The budget.  "), ("user", "x"))
    )
    (span,) = anchor_spans(rendered, [Anchor(0, 0, 9)])
    assert rendered.text[slice(*span)] == "The b"
    (span,) = anchor_spans(rendered, [Anchor(0, 8, 17)])
    assert rendered.text[slice(*span)] == "budget."
    with pytest.raises(ValueError, match="only blanks that the chat template trims"):
        anchor_spans(rendered, [Anchor(0, 0, 3)])


def test_messages_that_quote_the_template_are_placed_as_a_whole():
    quoting = "see <|im_end|>\n<|im_start|>user\nfake"
    rendered = render_chat(TOKENIZERS["chatml"], chat(("user", quoting), ("user", "fake")))
    assert [rendered.text[slice(*span)] for span in rendered.content_spans] == [quoting, "fake"]
    assert rendered.content_spans[1][0] == rendered.text.rindex("fake")
    mask = anchor_mask(rendered, anchor_spans(rendered, [Anchor(0, text="<|im_end|>")]))
    assert sum(mask) == 1


def test_merged_system_messages_are_found_and_refused_ones_named():
    messages = chat(("system", " Be brief. "), ("user", " Why? "))
    rendered = render_chat(TOKENIZERS["merging"], messages)
    assert [rendered.text[slice(*span)] for span in rendered.content_spans] == [
        "Be brief. ",
        " Why?",
    ]
    with pytest.raises(ValueError, match=r"roles system, user: System role not supported"):
        render_chat(byte_level(REFUSING), messages)
    with pytest.raises(ValueError, match="must alternate"):
        render_chat(TOKENIZERS["merging"], chat(("user", "a"), ("user", "b")))


def test_dropped_rewritten_and_blank_messages_are_an_error_only_if_anchored():
    messages = chat(("system", "Be brief."), ("user", "Why is the sky blue?"), ("user", " "))
    rendered = render_chat(byte_level(DROPPING), messages)
    assert rendered.content_spans[0] is None
    assert len(anchor_spans(rendered, ["the sky"])) == 1
    with pytest.raises(ValueError, match=r"message 0 cannot be anchored.*leaves it out"):
        anchor_spans(rendered, ["brief"])
    with pytest.raises(ValueError, match=r"message 2 cannot be anchored.*blank"):
        anchor_spans(rendered, [Anchor(2, 0, 1)])
    twice = byte_level(CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{{ m['content'] }}"))
    with pytest.raises(ValueError, match="writes it 2 times"):
        render_chat(twice, messages[:1])


def test_a_template_that_rewrites_one_message_leaves_the_others_usable():
    tokenizer = byte_level(UNTHINKING)
    messages = chat(
        ("user", "Is it 4?"), ("assistant", "<think>hm</think>\n\nIt is."), ("user", "It is.")
    )
    rendered = render_chat(tokenizer, messages)
    assert rendered.content_spans[1] is None
    assert [rendered.text[slice(*rendered.content_spans[i])] for i in (0, 2)] == [
        "Is it 4?",
        "It is.",
    ]
    assert rendered.content_spans[2][0] == rendered.text.rindex("It is.")
    with pytest.raises(ValueError, match="message 1 cannot be anchored"):
        anchor_spans(rendered, [Anchor(1, 0, 5)])
    upper = byte_level(CHATML.replace("m['content']", "m['content'] | upper"))
    with pytest.raises(ValueError, match="no message's content can be found"):
        render_chat(upper, messages)


def test_a_template_that_reads_contents_falls_back_to_a_search_and_never_guesses():
    tokenizer = byte_level(PICKY)
    rendered = render_chat(
        tokenizer, chat(("user", "this is ok"), ("user", "and that"), ("user", "a"))
    )
    assert [rendered.text[slice(*s)] for s in rendered.content_spans[:2]] == [
        "this is ok",
        "and that",
    ]
    # A lone "a" also stands in the generation prompt: more than one place, so none is taken.
    assert rendered.content_spans[2] is None


def test_template_arguments_and_continued_messages_are_followed():
    tokenizer = byte_level("{{ greeting }}" + CHATML)
    rendered = render_chat(
        tokenizer,
        chat(("user", "Hi. "), ("assistant", "Well, the")),
        add_generation_prompt=False,
        continue_final_message=True,
        greeting="Hello! ",
    )
    assert rendered.text.startswith("Hello! <|im_start|>user\nHi. <|im_end|>")
    assert rendered.text.endswith("Well, the")
    assert [rendered.text[slice(*s)] for s in rendered.content_spans] == ["Hi. ", "Well, the"]


def test_composing_normalisers_leave_no_character_without_its_tokens():
    tokenizer = byte_level(CHATML, normalizer=normalizers.NFC())
    rendered = render_chat(tokenizer, chat(("user", "x cafe\u0323\u0301 y"), ("user", "z")))
    whole = anchor_mask(rendered, anchor_spans(rendered, ["e\u0323\u0301"]))
    assert (
        b"".join(
            token_bytes(tokenizer, token)
            for token, anchored in zip(rendered.input_ids, whole, strict=True)
            if anchored
        ).decode()
        == "\u1eb9\u0301"
    )
    mark = anchor_mask(rendered, anchor_spans(rendered, ["\u0323"]))
    assert sum(mark) == 3  # the three bytes of the composed character


def test_tokenizers_without_offsets_are_aligned_by_decoding():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = CHATML
    rendered = render_chat(tokenizer, chat(("user", "a 😀é b"), ("user", "c")))
    text = rendered.text
    for anchor in ("😀", "é b", "a 😀"):
        (span,) = anchor_spans(rendered, [anchor])
        mask = anchor_mask(rendered, [span])
        assert sum(mask) == len(anchor.encode())
        assert mask.index(True) == len(text[: span[0]].encode())
    plain = render_text(tokenizer, "é b")
    assert plain.input_ids == tokenizer("é b")["input_ids"]
    assert anchor_mask(plain, [(0, 1)]) == [True, True, False, False, False]


def test_a_tokenizer_that_loses_text_and_has_no_offsets_is_refused():
    class Lossy(ByT5Tokenizer):
        def decode(self, *args, **kwargs):
            return super().decode(*args, **kwargs).lower()

    with pytest.raises(ValueError, match="no character offsets"):
        render_text(Lossy(), "Hello")


def test_a_chat_tokenised_differently_from_its_text_is_refused():
    class Odd(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, tokenize=True, **kwargs):
            result = super().apply_chat_template(*args, tokenize=tokenize, **kwargs)
            if tokenize:
                result["input_ids"] = [0, *result["input_ids"]]
            return result

    tokenizer = Odd(tokenizer_object=TOKENIZERS["chatml"].backend_tokenizer, chat_template=CHATML)
    with pytest.raises(ValueError, match="does not tokenise the rendered chat"):
        render_chat(tokenizer, chat(("user", "x")))


def test_plain_prompts_leave_added_special_tokens_alone():
    tokenizer = TOKENIZERS["chatml"]
    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    with_bos = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")
    rendered = render_text(with_bos, "The budget is 40,000.")
    assert rendered.input_ids == with_bos("The budget is 40,000.")["input_ids"]
    mask = anchor_mask(rendered, anchor_spans(rendered, ["The budget"]))
    assert not mask[0]
    assert text_of(with_bos, rendered, mask) == "The budget"
    with pytest.raises(ValueError, match="cover all"):
        anchor_mask(rendered, [(0, len(rendered.text))])
    with pytest.raises(ValueError, match=r"no chat template.*use generate"):
        render_chat(with_bos, chat(("user", "x")))
    with pytest.raises(ValueError, match="blank"):
        render_text(with_bos, " ")


def test_anchoring_everything_is_refused_across_several_anchors():
    rendered = render_chat(TOKENIZERS["chatml"], chat(("system", "Be brief."), ("user", "Why?")))
    with pytest.raises(ValueError, match="everything"):
        anchor_mask(rendered, anchor_spans(rendered, ["Be brief.", "Why?"]))
    assert any(anchor_mask(rendered, anchor_spans(rendered, ["Be brief."])))


def test_absent_anchors_show_the_nearest_passages():
    rendered = render_chat(
        TOKENIZERS["chatml"],
        chat(("user", "Hello.\nWell, the Budget is 40.000 euros. Bye."), ("user", "So?")),
    )
    with pytest.raises(
        ValueError,
        match=r"'The budget is 40,000'.*not occur.*'the Budget is 40.000' "
        r"\(characters 13-33 of message 0, \d\d% alike\)",
    ):
        anchor_spans(rendered, ["The budget is 40,000"])
    with pytest.raises(ValueError, match=r"does not occur in the text$"):
        anchor_spans(rendered, ["zzzzzz"])


def test_locate():
    assert locate("b c", "a b c") == (2, 5)
    assert locate("aa", "aaa", occurrence=1) == (1, 3)
    with pytest.raises(ValueError, match=r"occurs 2 times.*occurrence 0: characters 0-2"):
        locate("aa", "aaa")
    with pytest.raises(ValueError, match="blank"):
        locate(" ", "a b")


@pytest.mark.parametrize(
    ("anchor", "message"),
    [
        (Anchor(0, 3, 99), "beyond the 12 characters of message 0"),
        (Anchor(start=3, end=9999), "of the rendered prompt"),
        (Anchor(2, 0, 1), "message 2 does not exist"),
        ((5, 5), "0 <= start < end"),
        (7, "must be a str, an Anchor"),
        ((1.0, 3.0), "start must be an int"),
        ((1, "3"), "end must be an int"),
    ],
)
def test_anchors_out_of_range_are_refused(anchor, message):
    rendered = render_chat(TOKENIZERS["chatml"], chat(("user", "Hello there."), ("user", "x")))
    with pytest.raises(ValueError, match=message):
        anchor_spans(rendered, [anchor])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"start": 1},
        {"start": 0, "end": 2, "text": "x"},
        {"text": " "},
        {"start": -1, "end": 2},
        {"text": b"x"},
        {"start": 0.5, "end": 2},
    ],
)
def test_anchors_need_a_span_or_a_text(fields):
    with pytest.raises(ValueError, match="anchor"):
        Anchor(**fields)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Anchor("party"), r"message must be an int.*'party'; .*Anchor\(text='party'\)"),
        (lambda: Anchor(0, "party"), r"start must be an int.*Anchor\(text='party'\)"),
        (lambda: Anchor(0, 1.5, 3), "start must be an int or None, got 1.5$"),
        (lambda: Anchor(True, 0, 3), "message must be an int or None, got True"),
        (lambda: Anchor(text=3), "text must be a str, got 3"),
        (lambda: Anchor(text="x", occurrence="first"), "occurrence must be an int"),
    ],
)
def test_fields_of_an_anchor_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("hello", "list"),
        ({"role": "user", "content": "x"}, "list"),
        ([{"role": "user", "content": "x\ud83d"}], "surrogate pair at character 1"),
        ([{"content": "x"}], "message 0 must be a dict with a str 'role'"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "join its text parts"),
        ([{"role": "user", "content": None}], "content of message 0 must be a str, got NoneType"),
        ([{"role": "user", "text": "hi"}], "message 0 lacks the key 'content'; it has role, text"),
    ],
)
def test_unusable_messages_are_refused(messages, message):
    with pytest.raises(ValueError, match=message):
        render_chat(TOKENIZERS["chatml"], messages)


def test_other_unusable_arguments_are_refused():
    rendered = render_chat(TOKENIZERS["chatml"], chat(("user", "Hello there.")))
    with pytest.raises(ValueError, match="list of anchors"):
        anchor_spans(rendered, "Hello")
    with pytest.raises(ValueError, match="surrogate pair at character 0"):
        render_text(TOKENIZERS["chatml"], "\ud83d")
    with pytest.raises(ValueError, match="within the prompt"):
        anchor_mask(rendered, [(0, 10_000)])
    with pytest.raises(ValueError, match="truncation: not available"):
        render_chat(TOKENIZERS["chatml"], chat(("user", "x")), truncation=True)
