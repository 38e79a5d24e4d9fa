"""Everything that can be wrong before the first step: one implementation of each check, for the command and for pre-flights."""

from mcp_grpo.doctor.examination import Subject, examine
from mcp_grpo.doctor.findings import Finding, Report


__all__ = ["Finding", "Report", "Subject", "examine"]
