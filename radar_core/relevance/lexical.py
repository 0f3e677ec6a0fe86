"""Lexical selection: sentences that share words with the query, by BM25."""

from __future__ import annotations

import logging
import sys
from typing import Any

import numpy as np

from radar_core.relevance.selector import Reading

__all__ = ["Lexical"]

logger = logging.getLogger("radar_core")

# Scripts without blanks between words: Thai and Lao, kana, Chinese characters.
_UNSPACED = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = rf"[{_UNSPACED}]|[^\W{_UNSPACED}]{{2,}}|\d"


class Lexical:
    """Compares a sentence with the query by the words they share: BM25, brought to [0, 1].

    similarity(s, q) = min(1, BM25(s, q) / BM25(q, q)): the sentence's score over that of the query
    itself, taken as one more sentence. So a sentence without a word of the query gets 0, one as
    short as the query with all its words 1, and the order is BM25's (except among those at 1). What
    else is in the conversation matters only as in BM25 itself: by how rare each word is, and by the
    average length.

    BM25 is Lucene's (k1 1.5, b 0.75), from bm25s. Words are compared in lower case as they stand,
    unstemmed and without the language's function words; single letters are dropped, single digits
    are not, and scripts without blanks are compared character by character.

    Args:
        language: ISO 639-1 code, for function words and for cutting messages into sentences; one
            whose function words bm25s does not know is compared with all its words.
        title: whether a sentence's title counts as part of it.

    Raises:
        ImportError: if bm25s is not installed.
        ValueError: if the language is no code.
    """

    def __init__(self, language: str = "en", title: bool = False) -> None:
        if not isinstance(language, str):
            raise ValueError(f"language must be a code such as 'en', got {language!r}")
        self.language = language
        self.title = title
        self._function_words = _function_words(language)
        self._words: dict[str, list[str]] = {}

    def __repr__(self) -> str:
        return f"Lexical({self.language!r}, title={self.title})"

    def similarities(self, reading: Reading) -> np.ndarray:
        """Compute every sentence's BM25 over the query's own; see `Selector.similarities`.

        A query without a word that counts (blank, or function words alone) is similar to nothing.
        """
        *sentences, query = self._cut([*reading.texts(self.title), reading.query])
        if not query:
            return np.zeros(len(sentences), np.float32)
        ranking = _bm25s().BM25(method="lucene", k1=1.5, b=0.75)
        ranking.index([*sentences, query], show_progress=False)
        scores = ranking.get_scores(query)
        return np.minimum(scores[:-1] / scores[-1], 1).astype(np.float32)

    def _cut(self, texts: list[str]) -> list[list[str]]:
        """Cut texts into words, each different one once in the life of this object."""
        new = [text for text in dict.fromkeys(texts) if text not in self._words]
        words = _bm25s().tokenize(
            new,
            token_pattern=_WORD,
            stopwords=self._function_words,
            return_ids=False,
            show_progress=False,
        )
        self._words.update(zip(new, words, strict=True))
        return [self._words[text] for text in texts]


def _bm25s() -> Any:
    known = "bm25s" in sys.modules
    try:
        import bm25s
    except ImportError as error:
        raise ImportError(
            'lexical selection needs bm25s; run: pip install "radar-kernels[agents]"'
        ) from error
    if not known:  # it sets its logger to DEBUG, so every index would appear in the user's log
        logging.getLogger("bm25s").setLevel(logging.WARNING)
    return bm25s


def _function_words(language: str) -> str | None:
    """Return bm25s's name for a language's function words, question words included."""
    name = "english_plus" if language == "en" else language
    try:
        _bm25s().tokenize([""], stopwords=name, show_progress=False)
    except ValueError:
        logger.warning(
            "bm25s knows no function words of language %r: all words are compared", language
        )
        return None
    return name
