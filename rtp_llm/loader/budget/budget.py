"""The budget of a load by each transport, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from rtp_llm.layers.quantised import WEIGHT, Quantisable
from rtp_llm.loader.context import LoadContext
from rtp_llm.loader.prepare import Prepared
from rtp_llm.plan.boxes import volume
from rtp_llm.plan.budget import Budget, staging_limits, transient_bytes
from rtp_llm.quantization.kernels import product_bytes
from rtp_llm.quantization.scaled import Scaled
from rtp_llm.transport.fastsafetensors.config import EffectiveConfig, effective
from rtp_llm.transport.fastsafetensors.memory import Order, chunk_staging_bytes, derived_bytes, order_of
from rtp_llm.transport.policy import FASTSAFETENSORS, SCRATCH
from rtp_llm.transport.scratch.staging import staging_bytes

#: Most bytes to check one value: a float32 copy, its absolute value or comparison, and a mask.
_BYTES_A_VALUE = 12


def scratch_budget(context: LoadContext, prepared: Prepared) -> Budget:
    """The own reader's budget."""
    plan, reader, kind = prepared.plan, context.reader, context.device.type
    return Budget(
        SCRATCH,
        plan.bytes_resident,
        staging_bytes(kind, reader.threads, reader.buffer_bytes),
        staging_limits(plan, reader).nbytes,
        max(transient_bytes(plan.deliveries), _finish_bytes(prepared.model, kind)),
    )


def chunked_budget(context: LoadContext, prepared: Prepared, order: Order, rank: int, config: EffectiveConfig) -> Budget:
    """The budget of rank ``rank``, where fastsafetensors reads the chunks of ``order``."""
    plan = prepared.plan
    return Budget(
        FASTSAFETENSORS,
        plan.bytes_resident,
        chunk_staging_bytes(order, rank, config.depth),
        derived_bytes(plan, order, context.reader.step_bytes),
        max(transient_bytes(plan.deliveries), _finish_bytes(prepared.model, context.device.type)),
    )


def predictions(context: LoadContext, prepared: Prepared) -> Iterator[Budget]:
    """The budget of each transport that can carry the plan out; only the own reader's for a plan with problems.

    Assumes a fastsafetensors that reads in chunks, installed here or not, and equal resident bytes on all ranks.

    Raises:
        ConfigError: settings of fastsafetensors that are not allowed.
    """
    yield scratch_budget(context, prepared)
    plan = prepared.plan
    if not plan.problems and all(file.format == "safetensors" for file in plan.catalog.files):
        config, place = effective(context.settings), plan.model.parallel
        order = order_of(plan, context.mode, config.chunk_for(plan.bytes_resident), place.tp_size * place.ep_size)
        yield chunked_budget(context, prepared, order, place.ep_rank * place.tp_size + place.tp_rank, config)


def _finish_bytes(model: nn.Module, device_type: str) -> int:
    """Device memory that the last step of a load takes beside the parameters: checks of the largest tensor, and memory that products
    on codes keep.

    Scales, indices, and codes of fewer than eight bits are checked.
    """
    most = products = 0
    for layer in model.modules():
        if isinstance(layer, Quantisable):
            held = layer.held.get(WEIGHT)
            if held is not None and device_type == "cuda":
                products += product_bytes(held.scheme, getattr(layer, held.scheme.forms[0].name).shape)
            for held in layer.held.values():
                narrow = isinstance(held.scheme, Scaled) and held.scheme.bits < 8
                for laid in held.laid.values():
                    if laid.form is not held.scheme.forms[0] or narrow:
                        most = max(most, max(volume(box) for box in laid.boxes))
    return _BYTES_A_VALUE * most + products
