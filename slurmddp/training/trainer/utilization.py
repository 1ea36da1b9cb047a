"""Measure how well a training uses its devices: floating point operations, MFU and peak memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from slurmddp.host.process import peak_memory_bytes
from slurmddp.short_text import typed_first_line
from slurmddp.training import rng
from slurmddp.training.distributon import Distributon
from slurmddp.training.run_log import RunLog
from slurmddp.training.trainer.batch import forward
from slurmddp.training.trainer.components import Components

PEAKS = {
    "V100": {"fp16": 125e12, "32": 15.7e12},
    "A100": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "32": 19.5e12},
    "H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "32": 51e12},
    "H100": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "32": 67e12},
    "H200": {"bf16": 989e12, "fp16": 989e12, "tf32": 494e12, "32": 67e12},
    "L40S": {"bf16": 362e12, "fp16": 362e12, "tf32": 183e12, "32": 91.6e12},
    "L4": {"bf16": 121e12, "fp16": 121e12, "tf32": 60e12, "32": 30.3e12},
    "T4": {"fp16": 65e12, "32": 8.1e12},
}
"""Largest number of operations per second of a GPU without sparsity, by a part of torch's name for it.

Source: NVIDIA's data sheets of these GPUs. H100 without "PCIe" is the SXM version.
"""


class Utilization:
    """Recorder of floating point operations per second, MFU and peak memory of a training.

    Args:
        distributon: the launched Distributon of the training.
        components: the components of the training.
        journal: the run log; it is active on rank 0.
    """

    def __init__(self, distributon: Distributon, components: Components, journal: RunLog) -> None:
        self._distributon = distributon
        self._components = components
        self._journal = journal
        self._flops: int | None = None
        """Operations for a batch of a rank, on rank 0; None if they are not counted."""
        self._recorded_bytes = 0
        """The largest peak memory of any rank, in bytes, that was recorded so far."""

    def count(self, batch: Any) -> None:
        """On rank 0, if `train.flops` is true, store the number of operations for `batch`.

        If they can't be counted, log and record a warning.
        """
        if not (self._components.settings.flops and self._distributon.is_global_zero):
            return

        try:
            self._flops = count_flops(self._components.bare_model, self._components.loss, batch)
        except Exception as error:
            reason = typed_first_line(error)
            text = f"The model's operations can't be counted, so TFLOP/s and MFU are not known ({reason})."
            self._journal.event("warned", about="flops", text=text)
            self._distributon.print(text)

    def at(self, rate: float) -> dict[str, float]:
        """Return how well each rank uses its device if the training has the speed `rate`.

        Args:
            rate: samples or tokens per second over all ranks.

        Returns:
            "tflops": 10^12 operations per second of a rank. "mfu", if the peak of the device is known: the
            model FLOPs utilization, their fraction of the peak (Chowdhery et al., PaLM, 2022, appendix B).
            Empty if operations are not counted.
        """
        if not self._flops:
            return {}

        components = self._components
        device = self._distributon.device
        flops_per_step = self._flops * components.loader.accumulate
        steps_per_s = rate / components.units_per_step(self._distributon.world_size)
        flops_per_s = flops_per_step * steps_per_s

        utilization = {"tflops": flops_per_s / 1e12}
        peak = peak_flops_of(device, components.settings.precision)
        if peak is not None:
            utilization["mfu"] = flops_per_s / peak
        return utilization

    def record_memory(self, step: int) -> None:
        """Record the peak memory of all ranks, if the largest has grown by over 1 %. All ranks call it."""
        device = self._distributon.device
        peak_bytes = self._distributon.all_gather(peak_memory(device))
        if max(peak_bytes) > 1.01 * self._recorded_bytes:
            self._recorded_bytes = max(peak_bytes)
            self._journal.event("memory", step=step, device=device.type, peak_bytes=peak_bytes)


def utilization_text(utilization: Mapping[str, float]) -> str:
    """Return the values of `Utilization.at` as the end of a log line; empty if there are none."""
    text = ""
    if "tflops" in utilization:
        text += f", {utilization['tflops']:.3g} TFLOP/s per rank"
    if "mfu" in utilization:
        text += f", MFU {utilization['mfu']:.0%}"
    return text


def peak_flops(name: str, precision: str, *, tf32: bool) -> float | None:
    """Return the peak floating point operations per second of a GPU, or None if they are not in PEAKS.

    Args:
        name: the result of torch.cuda.get_device_name.
        precision: `train.precision`.
        tf32: whether float32 matrices are multiplied in TF32.
    """
    if tf32 and precision == "32":
        precision = "tf32"

    words_of_name = f" {name.replace('-', ' ')} "
    for model, peaks in PEAKS.items():
        if f" {model} " in words_of_name:
            return peaks.get(precision)

    return None


def peak_flops_of(device: torch.device, precision: str) -> float | None:
    """Return the peak floating point operations per second of a device, or None if they are unknown."""
    if device.type != "cuda":
        return None

    tf32 = torch.backends.cuda.matmul.allow_tf32
    return peak_flops(torch.cuda.get_device_name(device), precision, tf32=tf32)


def count_flops(model: nn.Module, loss: Callable[..., Any], batch: Any) -> int:
    """Return the number of floating point operations of a forward and backward pass on a batch.

    Both passes run on torch's fake tensors, which have no data. So they take no device time, and change
    neither the model nor its buffers nor random states. Masked entries of attention are counted too.

    Args:
        model: the bare module; a copy of its structure runs.
        loss: a function of (outputs, targets) that returns a scalar, or a pair whose first value is a scalar.
        batch: a batch as the loader yields it.

    Raises:
        Exception: the model can't run without data, for example because it branches on a value.
    """
    # Import these modules here and not at the top: fake tensors import sympy, which takes a second.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    random_states = rng.capture()
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            tensors = [*model.parameters(), *model.buffers()]
            memo = {id(tensor): fake.from_tensor(tensor) for tensor in tensors}
            shadow = copy.deepcopy(model, memo)
            batch = pytree.tree_map_only(torch.Tensor, fake.from_tensor, batch)
            # Compute attention by plain operations (MATH): torch 2.13 does not count the operations of fused
            # attention on CPUs.
            with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
                result = loss(*forward(shadow, batch))
                scalar = result if isinstance(result, torch.Tensor) else result[0]
                scalar.backward()
    finally:
        rng.restore(random_states)

    return int(counter.get_total_flops())


def peak_memory(device: torch.device) -> int:
    """Return the peak memory of this rank in bytes: of its GPU, or of its process if it computes on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_memory_bytes()
