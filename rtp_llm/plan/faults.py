"""Everything that can be wrong between a checkpoint and a model."""

from __future__ import annotations

from enum import Enum


class PlanFault(Enum):
    """Faults found when mapping, checkpoint and model are joined."""

    UNEXPECTED_TENSOR = "a checkpoint tensor that no rule places and no skip rule names"
    MISSING_TENSOR = "the model needs a tensor that the checkpoint does not hold"
    DOUBLED_TENSOR = "two checkpoint tensors provide the same logical tensor"
    SHAPE_MISMATCH = "a checkpoint tensor has another shape than the model"
    DTYPE_MISMATCH = "a checkpoint tensor has a dtype that the parameter cannot take"
    PRECISION_LOST = "a checkpoint tensor is stored in a narrower dtype than the model needs"
    EXPERT_COUNT = "config.json and the checkpoint do not have the same number of experts"
    SOURCE_UNCOVERED = "parts of a checkpoint tensor are used twice or not at all"
    NOT_REVERSIBLE = "a parameter cannot be written back as it stood in the checkpoint"
    OUT_OF_MEMORY = "the predicted peak does not fit the free memory"
    INTERNAL = "a model or a mapping of rtp-llm contradicts itself"
