"""Messages, rounds and the three shapes of JSON lines."""

import json

import pytest

from radar_core.transcript import Message, Transcript


def write(path, rows, encoding="utf-8"):
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding)
    return path


def test_a_round_not_given_is_the_number_of_earlier_messages_of_the_same_sender():
    transcript = Transcript()
    for sender in ("a", "b", "a", "a", "c", "b"):
        transcript.append(sender, "hello")
    assert [message.round for message in transcript] == [0, 0, 1, 2, 0, 1]
    assert transcript.append("a", "late", round=9) == Message("a", 9, "late")
    assert transcript.append("a", "again").round == 10
    assert transcript.senders == ("a", "b", "c")


def test_starting_messages_count_towards_later_rounds():
    transcript = Transcript([Message("a", 0, "one"), Message("a", 1, "two")])
    assert transcript.append("a", "three").round == 2
    assert len(transcript) == 3


def test_a_round_not_given_is_none_that_has_passed():
    """Else leaving some rounds out would age the newest messages without a word."""
    transcript = Transcript()
    given = [("a", 6), ("b", None), ("b", None), ("a", None), ("c", 9), ("a", None), ("b", 2)]
    for sender, round in given:
        transcript.append(sender, "hello", round=round)
    assert [message.round for message in transcript] == [6, 6, 7, 7, 9, 9, 2]
    assert transcript.append("d", "hello").round == 9
    assert Transcript([Message("a", 7, "x")]).append("b", "hello").round == 7
    same = Transcript([Message("a", 0, "one"), Message("a", 0, "two")])
    assert same.append("a", "three").round == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"sender": "", "text": "x"}, "sender"),
        ({"sender": 3, "text": "x"}, "sender"),
        ({"sender": "a", "text": None}, "text"),
        ({"sender": "a", "text": "x\ud83d"}, "text holds half a surrogate pair at character 1"),
        ({"sender": "a\ud83d", "text": "x"}, "sender holds half a surrogate pair at character 1"),
        ({"sender": "a", "text": "x", "round": -1}, "round"),
        ({"sender": "a", "text": "x", "round": 1.5}, "round"),
        ({"sender": "a", "text": "x", "round": True}, "round"),
        ({"sender": "a", "text": "x", "round": 2**70}, "round must be at most 2147483647"),
    ],
)
def test_unusable_messages_are_refused_and_leave_nothing_behind(fields, named):
    transcript = Transcript()
    with pytest.raises(ValueError, match=named):
        transcript.append(**fields)
    assert len(transcript) == 0
    assert transcript.append("a", "x").round == 0


def test_plain_messages_a_line_with_a_byte_order_mark_blank_lines_and_line_separators(tmp_path):
    rows = [
        {"sender": "planner", "text": "Erst\u2028dann 😀.", "turn": 17},
        {"sender": "critic", "text": "No.", "round": 4},
        {"sender": "planner", "text": ""},
    ]
    path = write(tmp_path / "a.jsonl", rows, "utf-8-sig")
    path.write_text(path.read_text("utf-8-sig") + "\n\n", "utf-8-sig")
    assert Transcript.from_jsonl(path).messages == (
        Message("planner", 0, "Erst\u2028dann 😀."),
        Message("critic", 4, "No."),
        Message("planner", 4, ""),
    )


def test_openai_messages_take_the_name_before_the_role_and_join_text_parts(tmp_path):
    rows = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "name": "coder", "content": [{"type": "text", "text": "A"}, "B"]},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
    ]
    assert Transcript.from_jsonl(write(tmp_path / "a.jsonl", rows)).messages == (
        Message("user", 0, "Hi."),
        Message("coder", 0, "AB"),
        Message("assistant", 0, ""),
    )


def test_whole_conversations_are_chosen_by_id_or_by_place(tmp_path):
    rows = [
        {"id": "first", "messages": [{"sender": "a", "text": "1", "turn": 40}]},
        {"messages": [{"role": "user", "content": "2"}]},
        {"id": "last", "messages": [{"sender": "c", "text": "3"}]},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    assert Transcript.from_jsonl(path, "first").messages == (Message("a", 0, "1"),)
    assert Transcript.from_jsonl(path, 1).messages == (Message("user", 0, "2"),)
    assert Transcript.from_jsonl(path, "last").messages == (Message("c", 0, "3"),)
    with pytest.raises(ValueError, match=r"holds 3 conversations.*first, 1, last"):
        Transcript.from_jsonl(path)
    with pytest.raises(ValueError, match=r"'frist'; did you mean 'first'\?"):
        Transcript.from_jsonl(path, "frist")
    only = write(tmp_path / "one.jsonl", rows[:1])
    assert len(Transcript.from_jsonl(only)) == 1
    twice = write(tmp_path / "twice.jsonl", [rows[0], rows[0]])
    with pytest.raises(ValueError, match=r"several lines.*1, 2"):
        Transcript.from_jsonl(twice, "first")


def test_a_whole_file_may_be_one_list(tmp_path):
    messages = [{"sender": "a", "text": "x"}, {"role": "user", "content": "y"}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps(messages, indent=1))
    assert [m.text for m in Transcript.from_jsonl(path)] == ["x", "y"]
    path.write_text(json.dumps([{"id": "t", "messages": messages}, {"messages": messages[:1]}]))
    assert [m.text for m in Transcript.from_jsonl(path, "1")] == ["x"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no messages"),
        ("\n \n", "holds no messages"),
        ('\n{"a":' + "[" * 100_000, r"a\.jsonl:2: the JSON is nested too deeply"),
        ('{"sender": "a", "text": "x", "round": ' + "9" * 5000 + "}", r"a\.jsonl:1: .*5000"),
        ('{"sender": "a", "text": "x"}\n{"sender": ', r"a\.jsonl:2: not JSON"),
        ('[\n{"sender": "a", "text": "x"}\n', r"a\.jsonl:3: not JSON"),
        ('[{"sender": "a", "text": "x"}, 3]', r"a\.jsonl: item 1 of the list is a int"),
        ('[{"sender": "a"}]', r"a\.jsonl:0: .*needs 'text'"),
        ("[" * 100_000, r"a\.jsonl: the JSON is nested too deeply"),
        ('{"sender": "a"}', r"a\.jsonl:1: .*needs 'text'"),
        ('{"role": "user"}', r"a\.jsonl:1: .*needs 'content'"),
        ('\n{"name": "a", "text": "x"}', r"a\.jsonl:2: .*got the fields name, text"),
        ('{"sender": "a", "text": 3}', r"a\.jsonl:1: text must be a str, got int"),
        ('{"role": "user", "content": [{"type": "image"}]}', r"a\.jsonl:1: content parts"),
        ('{"sender": "a", "text": "x", "round": "1"}', r"a\.jsonl:1: round"),
        ('{"messages": []}', r"a\.jsonl:1: 'messages'"),
        ('{"messages": [{"sender": "a", "text": "x"}, 3]}', r"a\.jsonl:1: message 1: "),
        ('{"messages": [{}]}\n{"sender": "a", "text": "x"}', r"a\.jsonl:2: some lines"),
    ],
)
def test_broken_files_are_refused_with_file_and_line(tmp_path, text, message):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Transcript.from_jsonl(path)


def test_other_encodings_and_superfluous_choices_are_refused(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"sender": "a", "text": "x"}\n{"sender": "\xe9", "text": "x"}')
    with pytest.raises(ValueError, match=r"a\.jsonl:2: not UTF-8"):
        Transcript.from_jsonl(path)
    path = write(path, [{"sender": "a", "text": "x"}])
    with pytest.raises(ValueError, match=r"conversation 'x' was asked for.*leave it out"):
        Transcript.from_jsonl(path, "x")
