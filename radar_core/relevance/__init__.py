"""Which sentences of a conversation matter for a query: one file a selector, decays shared."""

from radar_core.relevance.attention import Attention
from radar_core.relevance.combined import Combined
from radar_core.relevance.dense import Dense, Relevance
from radar_core.relevance.lexical import Lexical
from radar_core.relevance.mentions import Mentions
from radar_core.relevance.score import ScoredSentence
from radar_core.relevance.segmentation import sentence_spans
from radar_core.relevance.selector import Reading, Selector

__all__ = [
    "Attention",
    "Combined",
    "Dense",
    "Lexical",
    "Mentions",
    "Reading",
    "Relevance",
    "ScoredSentence",
    "Selector",
    "sentence_spans",
]
