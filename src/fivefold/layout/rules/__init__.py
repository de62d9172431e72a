"""Rules are data: each has an id, a predicate over columns of layouts, a message with the user's own option and its
legal values, a source, runtimes and versions. The planner, the check, the exporters and the trainer use this list."""

from fivefold.layout.rules.context import Context
from fivefold.layout.rules.engine import RULES, rules_for, valid_mask
from fivefold.layout.rules.refusals import OPTIONS, legal_values, violations
from fivefold.layout.rules.rule import Rule, Violation

__all__ = ["OPTIONS", "RULES", "Context", "Rule", "Violation", "legal_values", "rules_for", "valid_mask", "violations"]
