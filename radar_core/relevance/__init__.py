"""Which sentences of a conversation matter for a query: one file a selector, decays shared."""

from radar_core.relevance.dense import Relevance
from radar_core.relevance.score import ScoredSentence
from radar_core.relevance.segmentation import sentence_spans

__all__ = ["Relevance", "ScoredSentence", "sentence_spans"]
