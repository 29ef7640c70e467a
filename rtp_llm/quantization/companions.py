"""The tensors beside a quantised weight in each format, and their layout where several matrices are stored as one.

In most formats a tensor's first dimension runs along the output features, as the weight's does.  GPTQ and AWQ store their tensors
``[in, out]``; group indices have the input dimension alone; scales of the whole tensor have no dimension to divide.
"""

from __future__ import annotations

from collections.abc import Mapping

from rtp_llm.plan.rules import Companion

_TABLE = (
    Companion("weight_scale"),
    # transformers joins the scales of blocks to stacked weights without repeating what they scale.
    Companion("weight_scale_inv", joint="_scale_inv"),
    Companion("weight_scale_2", rows=None),
    Companion("weight_global_scale", rows=None),
    Companion("weight_packed"),
    Companion("weight_shape", rows=None),
    Companion("weight_zero_point"),
    Companion("weight_g_idx", rows=None),
    Companion("input_scale", rows=None),
    Companion("input_global_scale", rows=None),
    Companion("qweight", rows=1),
    Companion("qzeros", rows=1),
    # Beside stacked experts these are gpt-oss's, with blocks as below; elsewhere GPTQ's and AWQ's.
    Companion("scales", rows=1, upright=True),
    Companion("g_idx", rows=None),
    Companion("blocks", stacked=4, upright=True),
)

#: By name, for every method: a tensor's name says that it is part of a quantised weight.
COMPANIONS: Mapping[str, Companion] = {companion.name: companion for companion in _TABLE}
