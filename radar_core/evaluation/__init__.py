"""Experiments that tell whether steering helps: data sets, metrics, statistics, and runs to resume."""
