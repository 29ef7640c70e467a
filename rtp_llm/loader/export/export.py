"""Writes a loaded model, sharded or fused, back as the checkpoint it came from: the plan run backwards."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from rtp_llm.checkpoint import DTYPES, TensorInfo
from rtp_llm.errors import PlanError, Problem, internal
from rtp_llm.loader.export.files import check_room, completed, copy_companions, header_bytes, renamed, write_index
from rtp_llm.loader.load import LoadedModel
from rtp_llm.parallel.watch import Watch
from rtp_llm.parallel.wire import as_bytes, receive_bytes, send_bytes
from rtp_llm.parallel.world import host_group, meeting
from rtp_llm.plan.boxes import Box, extent, view, whole
from rtp_llm.plan.coverage import tiles
from rtp_llm.plan.dtypes import cast_is_exact
from rtp_llm.plan.faults import PlanFault
from rtp_llm.plan.ops import Source
from rtp_llm.plan.plan import Delivery, LoadPlan, Target
from rtp_llm.transport.scratch.files import Files


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of a slot, and the rank that has it."""

    box: Box
    rank: int


def export_checkpoint(loaded: LoadedModel, directory: str | os.PathLike[str]) -> Path:
    """Writes ``loaded`` to ``directory`` as a Hugging Face checkpoint; every rank of the model must call it.

    Tensors get their names, shapes, dtypes and files back, and their bytes are those of the source.  Tensors that a
    rule skipped are copied from the source, as are configuration and tokeniser.  Torch files become safetensors files.
    Rank 0 writes, and holds one tensor at a time; nothing appears under ``directory`` before it is complete.

    Returns:
        The directory.

    Raises:
        ConfigError: ``directory`` is there already and not empty, or the disk is too small.
        PlanError: listing every tensor that a cast has narrowed or that no set of ranks holds whole.
        TransportError: the source could not be read for a skipped tensor.
    """
    plan, world = loaded.plan, loaded.world
    out = Path(directory)
    with world.watch(together=False) as watch:
        _refuse_lossy(plan)
        if world.rank == 0:
            check_room(out, loaded.directory, sum(t.nbytes for t in plan.catalog.tensors))
        schedule = _schedule(plan, watch.all_gather_json([(d.slot, d.slot_box) for d in plan.deliveries]))
        with host_group(world, watch) if world.size > 1 else nullcontext() as group:
            exporter = _Exporter(loaded, watch, group, schedule)
            if world.rank == 0:
                with completed(out) as partial:
                    exporter.write(partial)
            else:
                exporter.send()
    return out


def _refuse_lossy(plan: LoadPlan) -> None:
    dtypes = {p.name: p.dtype for p in plan.model.params}
    lost = [d for d in plan.deliveries if _holder(d, dtypes) is None]
    plain = [(d, target.param) for d in lost for target in d.targets if target.param in dtypes]
    made = {d.tensor.name: d for d in lost if all(target.param not in dtypes for target in d.targets)}
    problems = [
        Problem(
            PlanFault.NOT_REVERSIBLE,
            "was quantised when it was loaded",
            file=d.tensor.file,
            tensor=d.tensor.name,
            expected=f"{d.stored_dtype} weights",
            actual="codes and scales made of them",
            fix="load without --quantization",
        )
        for d in made.values()
    ]
    problems += [
        Problem(
            PlanFault.NOT_REVERSIBLE,
            f"was narrowed when it was loaded to {param}",
            file=d.tensor.file,
            tensor=d.tensor.name,
            expected=f"{d.stored_dtype} or wider",
            actual=dtypes[param],
            fix="load with a dtype that holds every stored value (rtp-llm export chooses one)",
        )
        for d, param in plain
    ]
    if problems:
        raise PlanError(problems)


def _holder(delivery: Delivery, dtypes: Mapping[str, str]) -> Target | None:
    """A target that still holds every stored value; None where there is none.

    ``dtypes``: by parameter.  A target that is no parameter is a derived tensor.
    """
    stored = str(delivery.stored_dtype)
    return next((t for t in delivery.targets if t.param in dtypes and cast_is_exact(stored, dtypes[t.param])), None)


def _schedule(plan: LoadPlan, held: list[list[tuple[str, list[list[int]]]]]) -> dict[str, tuple[_Part, ...]]:
    """For each slot its boxes, each from the lowest rank that has it; the same on every rank."""
    parts: defaultdict[str, dict[Box, int]] = defaultdict(dict)
    for rank, deliveries in enumerate(held):
        for slot, pairs in deliveries:
            parts[slot].setdefault(tuple((a, b) for a, b in pairs), rank)
    problems = [
        Problem(
            PlanFault.NOT_REVERSIBLE,
            f"no set of ranks holds all of {slot}",
            tensor=source.raw,
            expected=f"all of {list(source.slot_shape)}",
            actual=f"{len(parts[slot])} parts on {len(held)} rank(s)",
            fix="export with all ranks of the group, under torchrun",
        )
        for slot, source in plan.slots.items()
        if not tiles(source.slot_shape, list(parts[slot]))
    ]
    if problems:
        raise PlanError(problems)
    return {slot: tuple(_Part(box, rank) for box, rank in boxes.items()) for slot, boxes in parts.items()}


class _Exporter:
    """Sends, or assembles and writes, every tensor; all ranks follow the order of the files."""

    def __init__(self, loaded: LoadedModel, watch: Watch, group: dist.ProcessGroup | None, schedule: dict[str, tuple[_Part, ...]]) -> None:
        self._loaded, self._watch, self._group, self._schedule = loaded, watch, group, schedule
        self._params = {name: p.data for name, p in loaded.model.named_parameters()}
        dtypes = {p.name: p.dtype for p in loaded.plan.model.params}
        self._mine = {(d.slot, d.slot_box): _holder(d, dtypes) for d in loaded.plan.deliveries}
        self._by_raw: defaultdict[str, list[tuple[str, Source]]] = defaultdict(list)
        for slot, source in loaded.plan.slots.items():
            self._by_raw[source.raw].append((slot, source))
        self._by_file: defaultdict[str, list[TensorInfo]] = defaultdict(list)
        for tensor in sorted(loaded.plan.catalog.tensors, key=lambda t: (t.file, t.start, t.name)):
            self._by_file[tensor.file].append(tensor)

    def send(self) -> None:
        """A rank above 0: sends its parts to rank 0."""
        assert self._group is not None
        with meeting(self._loaded.world, self._watch) as check:
            for tensors in self._by_file.values():
                for tensor in tensors:
                    for slot, _ in self._by_raw[tensor.name]:
                        for part in self._schedule[slot]:
                            if part.rank == self._loaded.world.rank:
                                send_bytes(self._held(slot, part.box, tensor), 0, self._group, check)

    def write(self, out: Path) -> None:
        """Rank 0: writes all files."""
        catalog = self._loaded.catalog
        names = renamed(f for f in catalog.files if f.name in self._by_file)
        with Files(catalog.directory, catalog.files) as source:
            for info in catalog.files:
                tensors = self._by_file.get(info.name)
                if tensors is None:
                    continue
                with open(out / names[info.name], "wb") as file:
                    file.write(header_bytes(tensors, info))
                    for tensor in tensors:
                        content = self._assembled(tensor) if tensor.name in self._by_raw else _copied(tensor, source)
                        file.write(as_bytes(content).numpy().data)
        write_index(out, catalog, {t.name: names[t.file] for t in self._loaded.plan.catalog.tensors})
        copy_companions(catalog, out)

    def _assembled(self, tensor: TensorInfo) -> torch.Tensor:
        dtype = _torch_dtype(tensor)
        raw = torch.empty(tensor.shape, dtype=dtype)
        for slot, source in self._by_raw[tensor.name]:
            content = torch.empty(source.slot_shape, dtype=dtype)
            for part in self._schedule[slot]:
                view(content, part.box).copy_(self._part(slot, part, tensor))
            view(raw, source.pull(whole(source.slot_shape))).copy_(source.reverse(content))
        return raw

    def _part(self, slot: str, part: _Part, tensor: TensorInfo) -> torch.Tensor:
        world = self._loaded.world
        if part.rank == world.rank:
            return self._held(slot, part.box, tensor)
        assert self._group is not None
        buffer = torch.empty(extent(part.box), dtype=_torch_dtype(tensor))
        with meeting(world, self._watch) as check:
            receive_bytes(buffer, part.rank, self._group, check)
        return buffer

    def _held(self, slot: str, box: Box, tensor: TensorInfo) -> torch.Tensor:
        """This rank's part of a slot, in the stored dtype, on the host."""
        target = self._mine[slot, box]
        if target is None:
            raise PlanError(internal(PlanFault.INTERNAL, "it was cast as it was loaded, and cannot be written back", tensor=slot))
        place = view(self._params[target.param], target.box)
        return place.reshape(extent(box)).to(device="cpu", dtype=_torch_dtype(tensor))


def _torch_dtype(tensor: TensorInfo) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, str(DTYPES[tensor.dtype].torch_name))
    return dtype


def _copied(tensor: TensorInfo, source: Files) -> torch.Tensor:
    """A skipped tensor's bytes, from the file it stands in, row-major."""
    buffer = torch.empty(tensor.nbytes, dtype=torch.uint8)
    source.read(tensor, buffer.numpy().data)
    if tensor.strides is None:
        return buffer
    return buffer.view(_torch_dtype(tensor)).as_strided(tensor.shape, tensor.strides).contiguous()
