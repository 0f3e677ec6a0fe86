"""The steering methods: their parameters and their algebra."""

from radar_core.methods.attention_bias import GUIDE, PASTA, AttentionBias, InstABoost
from radar_core.methods.guard import Guard
from radar_core.methods.method import Method, NoSteering
from radar_core.methods.second_prompt import CAD, CFG, SecondPrompt
from radar_core.methods.seka import PRISM, SEKA, AdaSEKA, Contrast, Projections
from radar_core.methods.spa import SPA
from radar_core.methods.target_mass import TargetMass

__all__ = [
    "CAD",
    "CFG",
    "GUIDE",
    "PASTA",
    "PRISM",
    "SEKA",
    "SPA",
    "AdaSEKA",
    "AttentionBias",
    "Contrast",
    "Guard",
    "InstABoost",
    "Method",
    "NoSteering",
    "Projections",
    "SecondPrompt",
    "TargetMass",
]
