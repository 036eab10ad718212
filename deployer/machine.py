"""What this machine is: architecture and CPU features, as far as compiled artifacts depend on them."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Collection
from pathlib import Path

#: x86 feature flags that compilers emit instructions for under -march=native
_ISA_FLAGS = re.compile(
    r"^(sse\w*|ssse3|avx\w*|amx\w*|fma|f16c|bmi[12]|abm|popcnt|movbe|adx|sha_ni|vaes|vpclmulqdq|gfni|asimd\w*|sve\w*)$"
)

#: CPU features of which each alone is enough for INT8 products to be summed in 32 bits: x86's VNNI in its three forms,
#: Arm's dot product
INT8_IN_32_BITS = ("amx_int8", "avx512_vnni", "avx_vnni", "asimddp")


def architecture() -> str:
    """`x86_64`, `aarch64`, …"""
    return platform.machine()


def cpu_features() -> tuple[str, ...]:
    """The instruction-set flags of this CPU, sorted; empty where /proc/cpuinfo does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ()
    found = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return tuple(sorted(flag for flag in set(found[1].split()) if _ISA_FLAGS.match(flag))) if found else ()


def sums_int8_in_32_bits() -> bool:
    """Whether this CPU adds the products of two INT8 numbers in 32 bits.

    Others (x86 with AVX2 or AVX512 alone) add two of them in 16, where 255 · 127 + 255 · 127 no longer fits: such a sum
    is cut off without a word, unless weights have 7 bits.
    """
    return not set(INT8_IN_32_BITS).isdisjoint(cpu_features())


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or "unknown CPU"
    found = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or "unknown CPU"


def gpu_fault(gpu_archs: Collection[str] = ()) -> str:
    """Why this process cannot use a CUDA GPU, or one of the generations `gpu_archs` (`sm86`, …; empty: any); "" where
    it can."""
    import torch

    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if not torch.cuda.is_available():
        return "no CUDA device answers"
    if gpu_archs and (own := gpu_arch()) not in gpu_archs:
        return f"this GPU ({torch.cuda.get_device_name()}) is {own}, not {', '.join(gpu_archs)}"
    return ""


def gpu_arch() -> str:
    """The generation of the current CUDA device, e.g. `sm86`; call it where `gpu_fault()` is ""."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def usable_cores() -> int:
    """Cores that this process may run on (a container's or taskset's limit, not the machine's count)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
