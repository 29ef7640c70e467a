"""What a load would take by each transport, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rtp_llm.config import LoadConfig
from rtp_llm.config.load import StackedMode
from rtp_llm.loader.stages import step_bytes
from rtp_llm.plan.plan import LoadPlan
from rtp_llm.transport.fastsafetensors.config import EffectiveConfig, effective
from rtp_llm.transport.fastsafetensors.memory import Order, making_bytes, order_of, staging_bytes
from rtp_llm.transport.policy import FASTSAFETENSORS, SCRATCH


def in_chunks(plan: LoadPlan, order: Order, rank: int, config: EffectiveConfig, device_type: str) -> LoadPlan:
    """The plan with what a load in chunks takes in place of what the own reader takes."""
    making = making_bytes(plan, order, step_bytes(device_type))
    return replace(plan, bytes_staging=staging_bytes(order, rank, config.depth), bytes_making=making)


def predictions(plan: LoadPlan, load: LoadConfig, device_type: str) -> Iterator[tuple[str, LoadPlan]]:
    """For each transport that can carry the plan out its name, and the plan with what it takes.

    ``plan`` is that of the own reader, and the only one if it has problems.  fastsafetensors is taken to be one that reads in chunks,
    whether or not it is installed here, and all ranks to have as much resident as this one.

    Raises:
        ConfigError: settings of fastsafetensors that are not allowed.
    """
    yield SCRATCH, plan
    if not plan.problems and all(file.format == "safetensors" for file in plan.files):
        config, place = effective(load), plan.parallel
        order = order_of(plan, StackedMode(load.stacked_moe_mode), config.chunk_for(plan.bytes_resident), place.tp_size * place.ep_size)
        yield FASTSAFETENSORS, in_chunks(plan, order, place.ep_rank * place.tp_size + place.tp_rank, config, device_type)
