"""Metrics against cases worked by hand from each benchmark's rules."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radar_core.evaluation import math_worker
from radar_core.evaluation.items import Problem, Question
from radar_core.evaluation.metrics import choice, exact_match, f1, final_answer, math_correct


def question(*answers, dataset="hotpotqa"):
    return Question("q", dataset, "?", answers, ())


@pytest.mark.parametrize(
    ("prediction", "answers", "dataset", "expected_f1", "expected_match"),
    [
        ("The Eiffel Tower!", ("eiffel tower",), "hotpotqa", 1, 1),
        ("an apple a day", ("apple day",), "hotpotqa", 1, 1),
        ("in Paris", ("Paris",), "hotpotqa", 2 / 3, 0),
        ("a  b b", ("b b b",), "hotpotqa", 4 / 5, 0),  # "a" is an article; two of three are shared
        ("yes", ("no",), "hotpotqa", 0, 0),
        ("yes it is", ("yes",), "hotpotqa", 0, 0),
        ("Yes.", ("yes",), "hotpotqa", 1, 1),
        ("yes it is", ("yes",), "musique", 1 / 2, 0),
        ("", ("the",), "musique", 1, 1),  # nothing is left of either
        ("", ("the",), "hotpotqa", 0, 1),
        ("", ("x",), "musique", 0, 0),
        ("Stanley Hall", ("G. Stanley Hall", "Stanley Hall"), "musique", 1, 1),
        ("U.S.", ("US",), "2wiki", 1, 1),
        ("no", ("no way", "no"), "2wiki", 1, 1),
        ("Zürich", ("zürich",), "hotpotqa", 1, 1),
        ("Theatre", ("atre",), "hotpotqa", 0, 0),  # articles are whole words
        ("well-known", ("wellknown",), "hotpotqa", 1, 1),
    ],
)
def test_answers(prediction, answers, dataset, expected_f1, expected_match):
    asked = question(*answers, dataset=dataset)
    assert f1(prediction, asked) == pytest.approx(expected_f1)
    assert exact_match(prediction, asked) == expected_match


WORDS = st.lists(st.sampled_from(["x", "y", "z", "the", "1890"]), max_size=6).map(" ".join)


@settings(max_examples=200, deadline=None)
@given(WORDS, WORDS, st.sampled_from(["hotpotqa", "musique", "2wiki"]))
def test_f1_is_symmetric_and_one_only_for_equal_bags(one, other, dataset):
    forth = f1(one, question(other, dataset=dataset))
    assert forth == f1(other, question(one, dataset=dataset))
    assert 0 <= forth <= 1
    bags = [sorted(word for word in text.split() if word != "the") for text in (one, other)]
    assert (forth == 1) == (bags[0] == bags[1] and (bool(bags[0]) or dataset == "musique"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Paris.", "Paris"),
        ("\n\n  **Paris**\nbecause", "Paris"),
        ("Let me think.\nThe answer is: 42.\n", "42"),
        ("The answer is 1. No, the answer is 2.", "2"),
        ("Answer: J. R. R. Tolkien", "J. R. R. Tolkien"),
        (r"so \boxed{\frac{1}{2}} and \boxed{x", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{{2}}", "{2}"),
        (r"\boxed{\text{Paris}}", "Paris"),
        (r"\boxed{\text{Paris}, \mathrm {US}}", "Paris, US"),
        (r"The answer is \textbf{New \emph{York}}.", "New York"),
        (r"\mbox{no}", "no"),
        (r"\boxed{\frac{1}{2}\text{ cm}}", r"\frac{1}{2} cm"),
        (r"Answer: \textwidth{3} and \text{open", r"\textwidth{3} and \text{open"),
        ("", ""),
        ("Perhaps Rome.\n**Answer**: Paris", "Paris"),
        ("Perhaps Rome.\n**Final answer**: Paris", "Paris"),
        ("Perhaps Rome.\n*Answer* is _Paris_", "Paris"),
        ("Perhaps Rome.\nFinal Answer\nParis", "Paris"),
        ("The answer is Rome.\n## **Answer**\r\n\r\n**Paris**\r\nbecause", "Paris"),
        ("The answer is Rome. <answer>Paris</answer> I hope", "Paris"),
        ("<ANSWER>\nParis\n</ANSWER>", "Paris"),
        ("Rome is no answer\nParis", "Rome is no answer"),
        ("It is Paris.\nAnswer\n", "It is Paris"),
        ("The answer isn't here", "The answer isn't here"),
    ],
)
def test_final_answer(text, expected):
    assert final_answer(text) == expected


@pytest.mark.parametrize(
    ("solution", "answer", "expected"),
    [
        (r"Thus \boxed{\frac{1}{2}}.", "0.5", True),
        (r"\boxed{3} is wrong, \boxed{4}", "4", True),
        (r"\boxed{3}", "4", False),
        ("The answer is $(8,-2)$.", "(8,-2)", True),
        ("I do not know.", "4", None),
        (r"\boxed{x+1}", "1+x", True),
    ],
)
def test_mathematics(solution, answer, expected):
    problem = Problem("p", "?", answer)
    assert math_correct(solution, problem) is expected
    with ThreadPoolExecutor(1) as pool:  # math-verify's time limits would need the main thread
        assert pool.submit(math_correct, solution, problem).result() is expected


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("The final answer is $12$. I hope it is correct, I checked 3 times.", "12"),
        ("The answer is 7. This took 2 steps.", "7"),
        ("The answer is 12 because 3*4 is 12 and 5 is wrong", "12"),
        ("final answer is $2k+2$. Check: $k=1$ gives $4$.", "2k+2"),
        ("The answer is 12, not 5.", "5"),
        ("The final answer is $12$, while the critic claimed $5$.", "5"),
        ("**Answer:** 12, then 5", "12"),
        ("The answer is 12, since x = 5", "12"),
        ("The final answer is 12, since x = 5", "12"),
        ("The final answer is: $x=3$, as $2$ fails", "3"),
        ("So the FINAL ANSWER is 5. Thanks to 3 critics", "5"),
        ("The final answer\nis 3. 2 is wrong", "3"),
        ("final answer: 3 of 7", "3"),
        ("Answer: 1,234 of 5", "1234"),
        ("We computed $5$. Thus the answer is $\\sqrt{2}$.", "\\sqrt{2}"),
        ("The answer is $4$ or $5$", "4"),
        ("Answer: 3 or maybe 4\n\nI am sure of 4.", "4"),
        ("I get $x=3$, and so the answer is found.", "3"),
        ("Let me see: 3*4 = 12", "12"),
        (r"\boxed{12}, not 5", "12"),
    ],
)
def test_a_statement_is_read_as_math_verify_reads_it(reply, answer):
    from math_verify import parse, verify

    expected = verify(parse(f"${answer}$"), parse(reply))
    assert (math_correct(reply, Problem("p", "?", answer)) is True) == expected


@pytest.mark.parametrize(
    "last", ["**Final answer**: $12$", "## Answer\n12 of 7", "<answer>12</answer> or 7?"]
)
def test_mathematics_reads_every_form_of_a_statement(last):
    said = f"The answer is $5$.\n{last}"
    assert math_correct(said, Problem("p", "?", "12")) is True
    assert math_correct(said, Problem("p", "?", "5")) is False


def test_the_last_statement_counts():
    said = "The critic's final answer is $5$. I say the answer is $12$, and I checked 3 times."
    assert math_correct(said, Problem("p", "?", "12")) is True
    assert math_correct(said, Problem("p", "?", "5")) is False


@pytest.fixture
def hasty(monkeypatch):
    """Give comparisons a second."""
    monkeypatch.setattr(math_worker, "LIMIT_SECONDS", 1.0)
    monkeypatch.setattr(math_worker, "_WORKER", math_worker._Worker())
    yield math_worker._WORKER
    math_worker._WORKER._end()


@pytest.mark.parametrize(
    "endless",
    ["9^{9^{9^9}}", "(10^{10})!", "(" * 3000 + "1" + ")" * 3000],
    ids=["power", "factorial", "brackets"],
)
def test_what_cannot_be_computed_is_wrong(endless, hasty):
    problem = Problem("p", "?", "5")
    begun = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math_correct, rf"\boxed{{{endless}}}", problem).result() is False
    assert math_correct(r"\boxed{5}", problem) is True
    assert time.monotonic() - begun < 60  # most of it to start anew


def test_a_process_that_was_ended_is_started_anew(hasty):
    assert hasty.equal("5", "5") is True
    hasty._process.kill()
    hasty._process.wait()
    assert hasty.equal("5", "5") is True


def test_an_interrupted_comparison_leaves_no_answer_behind(hasty, monkeypatch):
    assert hasty.equal("5", "5") is True

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(hasty._process.stdout, "readline", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        hasty.equal("5", "5")
    assert hasty.equal("6", "5") is False


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("The answer is (B). No: the answer is (C).", 10, "C"),
        ("Answer: D", 10, "D"),
        ("**Answer: (E)**", 10, "E"),
        ("B", 4, "B"),
        ("I would go with C because of A", 4, "C"),
        ("A", 4, "A"),
        ("The answer is (J)", 4, None),
        ("The answer is Berlin", 4, None),
        ("I do not know.", 4, None),
        ("", 4, None),
    ],
)
def test_choice(text, options, expected):
    assert choice(text, options) == expected


@pytest.mark.parametrize(
    "last",
    [
        "Therefore \\boxed{C}",
        "On reflection, the answer is $\\boxed{C}$.",
        r"\boxed{\textbf{(C)}}",
        r"\boxed{C. Paris}",
        "FINAL ANSWER: C",
        "**Final Answer**: C",
        "### Final Answer\n\n**C**",
        "<answer>C</answer>",
        '{"answer": "C"}',
        "Answer - C",
        "No: the answer is option C.",
        "The answer is therefore the letter C",
        "The correct choice is (C)",
        "My answer must be C.",
        'No, the answer is "C"',
        "No, the answer is ‘C’",
        r"So the answer is \(C\)",
        r"The answer is $\text{C}$",
        r"The answer is [\mathrm{C}]",
        "Actually the answer is not A but C.",
        "It is not (A), but rather option C.",
        "The answer is not A. It is C.",
        "C is the correct answer, not A.",
        "**C** is the answer.",
    ],
)
def test_the_last_choice_counts_in_every_form(last):
    assert choice(f"The answer is A.\n{last}", 4) == "C"
    assert choice(f"{last}\nBut no: the answer is (B).", 4) == "B"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The answer is N/A. I give up.", None),
        ("A cat sat.", None),
        ("It sat. A cat, of course", None),
        ("I think that nobody knows.", None),
        ("The answer is not A.", None),
        ("It's not (A)", None),
        ("The matrix A' is singular.", None),
        ("He is from Villeneuve d'A", None),
        ("A because of the rest", "A"),
        ("I choose A over the rest", "A"),
        ("A", "A"),
        ("Option I is right", "I"),
        ("I", "I"),
        ("'C'", "C"),
        ("The answer is I think B", "B"),
        (r"The answer is A, as \boxed{F = 5}", "A"),
        (r"The answer is A, as \boxed{F m a}", "A"),
        (r"The answer is A, as \boxed{\mathbf{F} = m a}", "A"),
        ("Answer choices: D) x. The answer is A", "A"),
        ("The answer is A. The answer is (J) of the list.", "J"),
    ],
)
def test_letters_that_are_words_or_symbols_are_no_choice(text, expected):
    assert choice(text, 10) == expected


def test_choice_needs_letters():
    with pytest.raises(ValueError, match="1 to 10, got 11"):
        choice("A", 11)
