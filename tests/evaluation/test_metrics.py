"""Metrics against cases worked by hand from each benchmark's rules."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
        ("", ""),
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


def test_choice_needs_letters():
    with pytest.raises(ValueError, match="1 to 10, got 11"):
        choice("A", 11)
