"""Where the rollouts of a step went: the totals that ``dbb_step`` holds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields


@dataclass(frozen=True)
class Usage:
    """Counts of one training step; the comments are those of the columns of ``dbb_step``."""

    generated: int = field(metadata={"comment": "rollouts generated"})
    generated_tokens: int = field(metadata={"comment": "their response tokens"})
    trained: int = field(metadata={"comment": "of these, rollouts trained on; the rest was filtered out"})
    trained_tokens: int = field(metadata={"comment": "their response tokens"})
    zero_variance: int = field(metadata={"comment": "generated rollouts in zero-variance groups"})
    informative: int = field(metadata={"comment": "trained rollouts of groups in which some advantage is not 0"})
    rescued: int = field(metadata={"comment": "of these, rollouts in zero-variance groups"})
    replayed: int = field(metadata={"comment": "rollouts of earlier steps trained on again"})
    replayed_tokens: int = field(metadata={"comment": "their response tokens"})
    skipped: int = field(metadata={"comment": "times a prompt was drawn and skipped before generation"})
    groups: int = field(metadata={"comment": "prompts with generated rollouts"})
    informative_groups: int = field(metadata={"comment": "prompts with informative rollouts"})

    def columns(self) -> dict[str, int]:
        """Return the counts as plain integers, by name."""
        return {name: int(count) for name, count in asdict(self).items()}


TOTALS = {count.name: str(count.metadata["comment"]) for count in fields(Usage)}
"""The counts of a step, with the comments of their columns."""
