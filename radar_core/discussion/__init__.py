"""Discussions of several agents: who speaks when, with what model, and a log to go on from."""

from radar_core.discussion.model import Answer, Model, Request

__all__ = ["Answer", "Model", "Request"]
