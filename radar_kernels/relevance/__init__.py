"""Relevance of sentences to queries: cosine times decay over hops and rounds."""
