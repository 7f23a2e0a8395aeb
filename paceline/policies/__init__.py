"""When contributions make an update, and when a worker may go on. Each policy is one file and one line here."""

from paceline.policies.asp import ASP
from paceline.policies.bsp import BSP
from paceline.policies.core import REGISTRY, Policy, find, settings
from paceline.policies.quorum import Quorum
from paceline.policies.ssp import SSP

__all__ = ["ASP", "BSP", "REGISTRY", "SSP", "Policy", "Quorum", "find", "settings"]
