"""fp32, bf16 and fp16 in the forward pass, with weights and optimizer in fp32 (mixed precision, Micikevicius et al.
2018)."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """Autocast and, for fp16, a loss scaler. `context()` surrounds the forward pass; the scaler's state is
    `scaler`'s."""

    def __init__(self, name: str, device: torch.device, *, loss_scale: float | None, tf32: bool) -> None:
        self.name, self.device = name, device
        self.dtype = DTYPES.get(name)
        # A scaler without a device means CUDA, and on a CPU switches itself off.
        self.scaler = torch.amp.GradScaler(device.type, init_scale=loss_scale or 2.0**16, enabled=name == "fp16")
        if tf32:
            torch.set_float32_matmul_precision("high")
            torch.backends.cudnn.allow_tf32 = True
            if device.type != "cuda":
                log.warning("tf32 is a mode of CUDA's matrix units; on the %s it changes nothing", device.type)
        if self.dtype is not None and device.type == "cpu" and not _cpu_computes(self.dtype):
            log.warning(
                "this CPU has no %s arithmetic: it is emulated, 20 times slower than fp32 and no more accurate", name
            )

    def context(self) -> AbstractContextManager[object]:
        if self.dtype is None:
            return nullcontext()
        return torch.amp.autocast(self.device.type, self.dtype)

    def scale(self, loss: Tensor) -> Tensor:
        return self.scaler.scale(loss) if self.scaler.is_enabled() else loss

    def unscale(self, optimizer: torch.optim.Optimizer, *, shared: bool) -> None:
        """Gradients back to their true size, once a step, before anything looks at them. `shared`: gradients lie in
        pieces on several processes, so that an overflow which one of them sees has to skip the step on all."""
        if not self.scaler.is_enabled():
            return
        self.scaler.unscale_(optimizer)
        if shared and dist.is_initialized():
            for found in self.scaler._found_inf_per_device(optimizer).values():
                dist.all_reduce(found, dist.ReduceOp.MAX)

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        """Take the optimizer step, unless fp16 overflowed in it; whether it was taken."""
        if not self.scaler.is_enabled():
            optimizer.step()
            return True
        before = self.scaler.get_scale()
        self.scaler.step(optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def forget(self) -> None:
        """End a step whose gradients are thrown away."""
        if self.scaler.is_enabled():
            self.scaler.update()


def _cpu_computes(dtype: torch.dtype) -> bool:
    supported = torch.ops.mkldnn
    if dtype is torch.bfloat16:
        return bool(supported._is_mkldnn_bf16_supported())
    return bool(supported._is_mkldnn_fp16_supported())
