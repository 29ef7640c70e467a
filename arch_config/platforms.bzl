"""The platform table: every fact about a platform, once.

A plain literal, so that Starlark loads it and Python reads it with `ast` (arch_config/table.py). Everything else
follows from it or is checked against it: config settings, requirement(), .bazelrc configs, MODULE.bazel's hubs,
requirement inputs, locks, wheel metadata and the table in docs/packaging.md. After a change: bazel run //deps:update.

Fields of a row
  os, cpu          what the wheel runs on, in the words of @platforms
  accelerator      "cuda", "rocm" or "none"
  toolkit          version of the accelerator's toolkit, "" without one
  python           the one minor version that the platform's lock and wheel are for
  torch            version (with its local label where the file has one); url and sha256 where no public index serves
                   the file, else None; requires: what the file's own metadata requires, for machines that cannot
                   reach the file; requires_known: where that list comes from
                     "read"      from the file itself
                     "reported"  from public reports of the file's metadata, not from the file
                     "partial"   only what all builds of that version share; the rest has not been seen
                     "index"     served by the index, which the resolver asks
  companions       files that torch requires and no public index serves: name, version, url, sha256. A hash or URL
                   that is not known is None: the file is then in no lock, and the checks list it as unverified
  flashinfer       variant (a key of FLASHINFER_VARIANTS) and version
  fastsafetensors  version, or None for a platform without it; one wheel serves CUDA, ROCm and CPU
  wheel_tag        the wheel's tag. cpXY: torch's file is for one Python. manylinux_2_28: what torch's file needs
  local_version    the wheel's local version label
"""

# Variant -> distributions, all of the row's flashinfer version: they refuse to work with one another otherwise.
# Linking (flashinfer_deps) and packaging (whl_deps) both read this list.
FLASHINFER_VARIANTS = {
    "none": [],
    "jit": ["flashinfer-python"],
    "cubin": ["flashinfer-python", "flashinfer-cubin"],
}

# Packages that carry libraries for two CUDA majors on purpose, whatever the platform: nvidia-cutlass-dsl's base
# package requires both and picks one when it is imported. Everything else named or labelled for another CUDA major
# than the platform's is a fault.
BOTH_CUDA_MAJORS = ["nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13"]

PLATFORMS = {
    "cuda12_9": {
        "os": "linux",
        "cpu": "x86_64",
        "accelerator": "cuda",
        "toolkit": "12.9",
        "python": "3.12",
        "torch": {
            "version": "2.13.0+cu129",
            "url": "https://download.pytorch.org/whl/cu129/torch-2.13.0%2Bcu129-cp312-cp312-manylinux_2_28_x86_64.whl",
            "sha256": "df28741fcd89e3da7cce2d48cbe5299d6732d510ac20f5d422d0b85edf18c327",
            "requires": [
                "filelock",
                "typing-extensions>=4.10.0",
                "setuptools>=77.0.3",
                "sympy>=1.13.3",
                "networkx>=2.5.1",
                "jinja2",
                "fsspec>=0.8.5",
                "cuda-toolkit[cublas,cudart,cufft,cufile,cupti,curand,cusolver,cusparse,nvjitlink,nvrtc,nvtx]==12.9.1",
                "cuda-bindings>=12.9.4,<13",
                "nvidia-cudnn-cu12==9.20.0.48",
                "nvidia-cusparselt-cu12==0.8.1",
                "nvidia-nccl-cu12==2.29.7",
                "nvidia-nvshmem-cu12==3.4.5",
                "triton==3.7.1",
            ],
            "requires_known": "reported",
        },
        "companions": [],
        "flashinfer": {"variant": "jit", "version": "0.6.6"},
        "fastsafetensors": "0.5.0",
        "wheel_tag": "cp312-none-manylinux_2_28_x86_64",
        "local_version": "cu129",
    },
    "cuda12_9_arm": {
        "os": "linux",
        "cpu": "aarch64",
        "accelerator": "cuda",
        "toolkit": "12.9",
        "python": "3.10",
        "torch": {
            "version": "2.9.0+cu129",
            "url": "https://download.pytorch.org/whl/cu129/torch-2.9.0%2Bcu129-cp310-cp310-manylinux_2_28_aarch64.whl",
            "sha256": "37780eb80e4319d6e004ea9597353da0b3947681866d7adff4757ece164a5cd9",
            "requires": [
                "filelock",
                "typing-extensions>=4.10.0",
                "sympy>=1.13.3",
                "networkx>=2.5.1",
                "jinja2",
                "fsspec>=0.8.5",
            ],
            "requires_known": "partial",
        },
        "companions": [],
        "flashinfer": {"variant": "jit", "version": "0.6.6"},
        "fastsafetensors": "0.5.0",
        "wheel_tag": "cp310-none-manylinux_2_28_aarch64",
        "local_version": "cu129",
    },
    "cuda13": {
        "os": "linux",
        "cpu": "x86_64",
        "accelerator": "cuda",
        "toolkit": "13.0",
        "python": "3.12",
        "torch": {
            "version": "2.13.0",
            "url": None,
            "sha256": None,
            "requires": [],
            "requires_known": "index",
        },
        "companions": [],
        "flashinfer": {"variant": "cubin", "version": "0.6.6"},
        "fastsafetensors": "0.5.0",
        "wheel_tag": "cp312-none-manylinux_2_28_x86_64",
        "local_version": "cu130",
    },
    "cuda13_arm": {
        "os": "linux",
        "cpu": "aarch64",
        "accelerator": "cuda",
        "toolkit": "13.0",
        "python": "3.12",
        "torch": {
            "version": "2.13.0",
            "url": None,
            "sha256": None,
            "requires": [],
            "requires_known": "index",
        },
        "companions": [],
        "flashinfer": {"variant": "cubin", "version": "0.6.6"},
        "fastsafetensors": "0.5.0",
        "wheel_tag": "cp312-none-manylinux_2_28_aarch64",
        "local_version": "cu130",
    },
    "rocm": {
        "os": "linux",
        "cpu": "x86_64",
        "accelerator": "rocm",
        "toolkit": "6.4",
        "python": "3.12",
        "torch": {
            "version": "2.9.1+rocm6.4",
            "url": "https://download-r2.pytorch.org/whl/rocm6.4/torch-2.9.1%2Brocm6.4-cp312-cp312-manylinux_2_28_x86_64.whl",
            "sha256": "43471c9e4520402b5feeebd6c6d180e8bf2314402925798fe219c32fecd1ef95",
            "requires": [
                "filelock",
                "typing-extensions>=4.10.0",
                "setuptools",
                "sympy>=1.13.3",
                "networkx>=2.5.1",
                "jinja2",
                "fsspec>=0.8.5",
            ],
            "requires_known": "partial",
        },
        "companions": [
            {"name": "pytorch-triton-rocm", "version": "3.5.1", "url": None, "sha256": None},
        ],
        "flashinfer": {"variant": "none", "version": None},
        "fastsafetensors": "0.5.0",
        "wheel_tag": "cp312-none-manylinux_2_28_x86_64",
        "local_version": "rocm6.4",
    },
    "cpu": {
        "os": "linux",
        "cpu": "x86_64",
        "accelerator": "none",
        "toolkit": "",
        "python": "3.11",
        "torch": {
            "version": "2.13.0+cpu",
            "url": "https://download.pytorch.org/whl/cpu/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_x86_64.whl",
            "sha256": "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",
            "requires": [
                "filelock",
                "typing-extensions>=4.10.0",
                "setuptools>=77.0.3",
                "sympy>=1.13.3",
                "networkx>=2.5.1",
                "jinja2",
                "fsspec>=0.8.5",
            ],
            "requires_known": "read",
        },
        "companions": [],
        "flashinfer": {"variant": "none", "version": None},
        "fastsafetensors": "0.5.0",
        "wheel_tag": "cp311-none-manylinux_2_28_x86_64",
        "local_version": "cpu",
    },
    "cpu_arm": {
        "os": "linux",
        "cpu": "aarch64",
        "accelerator": "none",
        "toolkit": "",
        "python": "3.11",
        "torch": {
            "version": "2.13.0+cpu",
            "url": "https://download.pytorch.org/whl/cpu/torch-2.13.0%2Bcpu-cp311-cp311-manylinux_2_28_aarch64.whl",
            "sha256": "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",
            "requires": [
                "filelock",
                "typing-extensions>=4.10.0",
                "setuptools>=77.0.3",
                "sympy>=1.13.3",
                "networkx>=2.5.1",
                "jinja2",
                "fsspec>=0.8.5",
            ],
            "requires_known": "partial",
        },
        "companions": [],
        "flashinfer": {"variant": "none", "version": None},
        "fastsafetensors": "0.5.0",
        "wheel_tag": "cp311-none-manylinux_2_28_aarch64",
        "local_version": "cpu",
    },
}
