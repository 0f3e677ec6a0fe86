"""Experiments that tell whether steering helps: data sets, metrics, statistics, runs."""
