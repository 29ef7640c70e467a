"""Every reason why a back end cannot do an operation."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from rtp_llm.errors import RtpLlmError


class KernelFault(Enum):
    """Why a back end cannot do an operation, in the order in which it is checked."""

    NOT_OFFERED = "the back end has no such operation"
    NOT_CUDA = "the device is not one of CUDA"
    NOT_INSTALLED = "the package is not installed"
    IMPORT_FAILED = "the package is installed, and its import fails"
    SYMBOL_MISSING = "the installed package has no such name"
    SIGNATURE = "the installed package takes other arguments than it is given"
    ARCHITECTURE = "the GPU is too old"
    DTYPE = "the operation does not exist in this dtype"
    SHAPE = "the operation does not exist for these sizes"
    NO_COMPILER = "what has to be compiled cannot be compiled here"
    COMPILE_FAILED = "the compiler refused"
    OTHER_CUDA = "it was compiled by another CUDA than torch's"


#: What to do about each.
FIXES: Mapping[KernelFault, str] = MappingProxyType(
    {
        KernelFault.NOT_OFFERED: "use --kernels auto, which takes torch for it",
        KernelFault.NOT_CUDA: "use --kernels auto or torch, or a CUDA device",
        KernelFault.NOT_INSTALLED: "install it: pip install {requirement}",
        KernelFault.IMPORT_FAILED: "repair the installation: pip install --force-reinstall {requirement}; where it is its directory that"
        " cannot be written, name another in FLASHINFER_WORKSPACE_BASE",
        KernelFault.SYMBOL_MISSING: "install the version that is supported: pip install {requirement}",
        KernelFault.SIGNATURE: "install the version that is supported: pip install {requirement}",
        KernelFault.ARCHITECTURE: "use --kernels auto or torch, or a newer GPU",
        KernelFault.DTYPE: "use --kernels auto, which takes torch for it, or --dtype bfloat16",
        KernelFault.SHAPE: "use --kernels auto, which takes torch for it",
        KernelFault.NO_COMPILER: "put ninja and nvcc of torch's CUDA on PATH, or install what is compiled (flashinfer-jit-cache of the"
        " same version); or use --kernels torch",
        KernelFault.COMPILE_FAILED: "look at the compiler's output in the file that is named; or use --kernels torch",
        KernelFault.OTHER_CUDA: "let CUDA_HOME name a toolkit of torch's CUDA; or use --kernels torch",
    }
)


class KernelError(RtpLlmError):
    """Kernels that were asked for and cannot be had."""

    step = "kernels"
