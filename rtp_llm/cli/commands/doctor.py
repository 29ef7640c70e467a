"""``rtp-llm doctor``: what this machine and this Python have for loading."""

from __future__ import annotations

import dataclasses
import platform
import stat
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from rtp_llm.cli import machine
from rtp_llm.cli.options import common, output_of
from rtp_llm.cli.output import pairs, print_table, size
from rtp_llm.transport import pagecache

#: Distributions that loading uses: what for, and whether it is required.
_PACKAGES = (
    ("torch", "tensors and devices", True),
    ("safetensors", "file format", True),
    ("transformers", "tokenizers and chat templates", True),
    ("tokenizers", "tokenizers", True),
    ("numpy", "buffers shared with torch", True),
    ("click", "command line", True),
    ("rich", "tables and progress", True),
    ("jinja2", "chat templates", True),
    ("fastsafetensors", "fast path to the GPU", False),
    ("flashinfer-python", "attention kernels", False),
)


@click.command(
    short_help="What this machine has for loading.", epilog="\b\nExamples:\n  rtp-llm doctor\n  rtp-llm doctor ./Qwen3-8B --json"
)
@click.argument("directory", required=False, type=click.Path(exists=True, file_okay=False))
@common
@click.pass_context
def doctor(context: click.Context, directory: str | None) -> int:
    """Show Python, torch, devices, packages and memory; with DIRECTORY also its file system and page cache.

    The exit code is 1 if something is missing that loading needs.
    """
    torch_found = _torch()
    document: dict[str, Any] = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "cpus": machine.cpu_count(),
        "memory": machine.memory(),
        "torch": torch_found,
        "packages": [_package(*row) for row in _PACKAGES],
        "tiers": _tiers(torch_found),
        "kernels": _kernels(torch_found),
        "compiler": machine.compiler(),
        "quantization": _quantization(torch_found),
        "directory": _directory(Path(directory)) if directory else None,
    }
    lacking = [p["name"] for p in document["packages"] if p["needed"] and p["version"] is None]
    document["problems"] = [f"{name} is not installed" for name in lacking]
    if torch_found["error"] is not None and "torch" not in lacking:
        document["problems"].append(f"torch cannot be imported: {torch_found['error']}")
    output_of(context).emit(document, lambda: _text(document))
    return 1 if document["problems"] else 0


def _package(name: str, use: str, needed: bool) -> dict[str, Any]:
    try:
        version: str | None = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = None
    return {"name": name, "version": version, "use": use, "needed": needed}


def _torch() -> dict[str, Any]:
    found: dict[str, Any] = {"version": None, "cuda": None, "rocm": None, "devices": [], "threads": None, "error": None}
    try:
        import torch
    except (ImportError, OSError, RuntimeError) as error:  # a library that does not load, or is built for another CPU
        return found | {"error": f"{type(error).__name__}: {error}"}
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    return found | {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "devices": [{"name": d.name, "bytes": d.total_memory, "capability": f"{d.major}.{d.minor}"} for d in devices],
        "threads": torch.get_num_threads(),
    }


def _tiers(torch_found: dict[str, Any]) -> list[dict[str, Any]]:
    """The transports, best last."""
    # Imported here: it imports torch.
    from rtp_llm.transport.fastsafetensors.probe import Tier, probe

    found = probe()
    return [
        {"name": "scratch", "usable": torch_found["error"] is None, "reason": torch_found["error"]},
        {"name": "fastsafetensors", "usable": found.tier >= Tier.WHOLE, "reason": f"{found.tier.name.lower()}: {found.reason}"},
    ]


def _kernels(torch_found: dict[str, Any]) -> list[dict[str, Any]]:
    """Each operation of each back end, and what is missing for it here."""
    if torch_found["error"] is not None:
        return []
    from rtp_llm.loader.kernels import survey

    return [{"op": op, "backend": backend, "usable": not lacks, "lacks": list(lacks)} for op, backend, lacks in survey()]


def _quantization(torch_found: dict[str, Any]) -> list[dict[str, Any]]:
    """How products with quantised weights are computed here, for each method."""
    if torch_found["error"] is not None:
        return []
    from rtp_llm.quantization.registry import METHODS

    return [{"name": m.name, "product": m.cuda if torch_found["devices"] else m.cpu} for m in METHODS]


def _directory(directory: Path) -> dict[str, Any]:
    files = [path for path in sorted(directory.iterdir()) if _regular(path)]
    listed = [{"name": path.name, "bytes": path.stat().st_size, "cached_bytes": pagecache.cached_bytes(path)} for path in files]
    where = pagecache.file_system(directory)
    return {"path": str(directory), "file_system": dataclasses.asdict(where) if where else None, "files": listed}


def _regular(path: Path) -> bool:
    """Whether a file is regular: no pipe, device or dangling link, which could block."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _text(document: dict[str, Any]) -> None:
    memory, found = document["memory"], document["torch"]
    known = {name: "unknown" if value is None else size(value) for name, value in memory.items()}
    limit = f", limit {known['limit']}" if memory["limit"] is not None else ""
    device = "; ".join(f"{d['name']}, {size(d['bytes'])}, sm {d['capability']}" for d in found["devices"]) or "CPU only"
    build = f"CUDA {found['cuda']}" if found["cuda"] else f"ROCm {found['rocm']}" if found["rocm"] else "CPU build"
    pairs(
        [
            ("python", f"{document['python']} ({document['executable']})"),
            ("platform", document["platform"]),
            ("cpus", document["cpus"]),
            ("memory", f"{known['total']}, {known['available']} available{limit}"),
            ("torch", f"{found['version']}, {build}, {found['threads']} threads" if found["version"] else f"unusable: {found['error']}"),
            ("devices", device),
        ]
    )
    print_table(("package", "version", "use"), [(p["name"], p["version"] or "not installed", p["use"]) for p in document["packages"]])
    print_table(("tier", "usable", "reason"), [(t["name"], "yes" if t["usable"] else "no", t["reason"] or "") for t in document["tiers"]])
    rows = [(k["op"], k["backend"], "yes" if k["usable"] else "no", "; ".join(k["lacks"])) for k in document["kernels"]]
    print_table(("kernel", "back end", "usable", "why not"), rows)
    pairs([("compiler", ", ".join(f"{name} {path or 'not found'}" for name, path in document["compiler"].items()))])
    print_table(("quantisation", "products here"), [(m["name"], m["product"]) for m in document["quantization"]])
    if document["directory"]:
        _directory_text(document["directory"])
    for problem in document["problems"]:
        click.echo(f"problem: {problem}")


def _directory_text(found: dict[str, Any]) -> None:
    where = found["file_system"]
    kind = f"{where['kind']} at {where['mount_point']}{', over a network' if where['network'] else ''}" if where else "unknown"
    pairs([("directory", found["path"]), ("file system", kind)])
    rows = [(f["name"], size(f["bytes"]), _share(f["cached_bytes"], f["bytes"])) for f in found["files"]]
    print_table(("file", "size", "in the page cache"), rows, frozenset({1, 2}))


def _share(cached: int | None, total: int) -> str:
    return "unknown" if cached is None else f"{100 * cached / total:.0f}%" if total else "empty"
