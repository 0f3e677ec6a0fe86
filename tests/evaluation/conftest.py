"""A tiny random model with the embedded tokenizer, and small files in the data sets' formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from radar_core import embedded
from radar_core.evaluation.command import Loaded
from tests.models.tiny import babbler

TOPICS = ("harbour", "castle", "orchard", "railway", "library", "lighthouse", "windmill", "museum")
SECRET = "zanzibar"


def unloaded() -> Loaded:
    """Stand where a model would be loaded and must not: options are looked at before."""
    raise AssertionError("the model was loaded although an option is wrong")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return embedded.load_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer: Any) -> Any:
    return babbler(len(tokenizer), 4096)


@pytest.fixture(scope="session")
def model_folder(model: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def question(number: int) -> dict[str, Any]:
    """A question in HotpotQA's format as Radar stores it; two of its three articles hold gold."""
    topic = TOPICS[number % len(TOPICS)]
    return {
        "id": f"q{number}",
        "question": f"In which year was the founder of the {topic} {SECRET} born?",
        "answer": str(1800 + number),
        "kind": "bridge",
        "level": "easy",
        "paragraphs": [
            {
                "title": f"The {topic}",
                "sentences": [
                    f"The {topic} was founded by person {number}.",
                    " It is old and many people visit it every year.",
                ],
                "supporting": [0],
            },
            {
                "title": "Weather",
                "sentences": ["It rains a lot in spring.", " Summers are dry."],
                "supporting": [],
            },
            {
                "title": f"Person {number}",
                "sentences": [
                    "This person liked walking.",
                    f" Person {number} was born in {1800 + number}.",
                ],
                "supporting": [1],
            },
        ],
    }


def conflict(number: int) -> dict[str, Any]:
    stem = f"The {TOPICS[number % len(TOPICS)]} stands in"
    return {
        "prompt": f"Redefine: {stem} Oslo. {stem}",
        "base_prompt": stem,
        "subject": f"The {TOPICS[number % len(TOPICS)]}",
        "context_answer": " Oslo",
        "memorised_answer": " New Delhi",
    }


def write(path: Path, items: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def questions_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write(folder / "questions.jsonl", [question(number) for number in range(12)])


@pytest.fixture(scope="session")
def conflicts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write(folder / "conflicts.jsonl", [conflict(number) for number in range(4)])
