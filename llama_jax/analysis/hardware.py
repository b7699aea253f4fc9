"""Peak figures of accelerators as published by their vendors, for MFU and rooflines."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from llama_jax.errors import ConfigError, short_repr

GIB = 1 << 30


@dataclass(frozen=True)
class Hardware:
    """The datasheet of one device, as JAX counts devices.

    Attributes:
      name: the product name.
      flops: bfloat16 matrix products with float32 accumulation, dense, FLOP/s. NVIDIA's datasheets often give twice that,
        "with sparsity".
      memory: bytes; a few percent of them are never free. Datasheets write GB for GiB.
      memory_bandwidth: bytes/s between memory and chip, reads and writes combined.
      link_bandwidth: bytes/s that the device can send to others over all its links together (NVLink, a TPU's interconnect,
        otherwise PCIe). It can receive as much at the same time: datasheets give the sum of both. On a TPU's torus,
        communication along one axis has a third or half of the links.
      domain: number of devices that these links connect: the GPUs of a machine, the chips of a TPU pod.
      network_bandwidth: bytes/s that the device can send beyond its domain, its share of the machine's network adapters in
        the vendor's configuration; None if none is published.
    """

    name: str
    flops: float
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    domain: int
    network_bandwidth: float | None = None

    def holds(self, size: int) -> bool:
        """Whether this many bytes fit into its memory, with 5% left for the driver and fragmentation."""
        return size <= 0.95 * self.memory


# By command-line name: the figures, and `jax.Device.device_kind`, which is a GPU's name in its driver or a TPU's in JAX's
# tables.
PUBLISHED_FIGURES = {
    # NVIDIA A100 Tensor Core GPU datasheet (2021): 312 TFLOPS, NVLink 600 GB/s both ways, two PCIe cards by a bridge;
    # A100 40 GB whitepaper: 1,555 GB/s. DGX A100 datasheet (2020): 8 GPUs, for each a ConnectX-6 of 200 Gb/s.
    "a100-40gb": (
        Hardware("A100 40 GB", 312e12, 40 * GIB, 1555e9, 300e9, 8, 25e9),
        ["NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"],
    ),
    "a100-pcie": (Hardware("A100 80 GB PCIe", 312e12, 80 * GIB, 1935e9, 300e9, 2), ["NVIDIA A100 80GB PCIe"]),
    "a100": (Hardware("A100 80 GB SXM", 312e12, 80 * GIB, 2039e9, 300e9, 8, 25e9), ["NVIDIA A100-SXM4-80GB"]),
    # NVIDIA H100 Tensor Core GPU datasheet (2022, with NVL 2024), half of the figures with sparsity: 1,979, 1,513 and 1,671;
    # cards bridged in pairs. DGX H100 datasheet (2023): 8 GPUs, 18 NVLinks of 50 GB/s both ways, a ConnectX-7 of 400 Gb/s.
    "h100": (Hardware("H100 SXM", 989.5e12, 80 * GIB, 3350e9, 450e9, 8, 50e9), ["NVIDIA H100 80GB HBM3"]),
    "h100-pcie": (Hardware("H100 PCIe", 756.5e12, 80 * GIB, 2000e9, 300e9, 2), ["NVIDIA H100 PCIe"]),
    "h100-nvl": (Hardware("H100 NVL", 835.5e12, 94 * GIB, 3900e9, 300e9, 2), ["NVIDIA H100 NVL"]),
    # NVIDIA H200 Tensor Core GPU datasheet (2024), half of 1,979 and 1,671; two or four cards bridged. DGX H200 as DGX H100.
    "h200": (Hardware("H200 SXM", 989.5e12, 141 * GIB, 4800e9, 450e9, 8, 50e9), ["NVIDIA H200"]),
    "h200-nvl": (Hardware("H200 NVL", 835.5e12, 141 * GIB, 4800e9, 450e9, 4), ["NVIDIA H200 NVL"]),
    # NVIDIA DGX B200 datasheet (2024), an eighth of 1,440 GB, 64 TB/s and 14.4 TB/s; Blackwell architecture brief: 2,250
    # dense; a ConnectX-7 of 400 Gb/s for each GPU.
    "b200": (Hardware("B200", 2250e12, 180 * GIB, 8000e9, 900e9, 8, 50e9), ["NVIDIA B200"]),
    # NVIDIA L4 datasheet (2023), half of 242; NVIDIA A10 datasheet (2021): 125 dense. Both PCIe 4.0 x16, 64 GB/s both ways.
    "l4": (Hardware("L4", 121e12, 24 * GIB, 300e9, 32e9, 1), ["NVIDIA L4"]),
    "a10": (Hardware("A10", 125e12, 24 * GIB, 600e9, 32e9, 1), ["NVIDIA A10"]),
    # NVIDIA Ampere GA102 GPU architecture whitepaper (2021): bfloat16 with float32 sums, dense; between two cards a
    # bridge of four NVLinks, 56.25 GB/s in each direction.
    "rtx-3090": (Hardware("GeForce RTX 3090", 71e12, 24 * GIB, 936e9, 56.25e9, 2), ["NVIDIA GeForce RTX 3090"]),
    # NVIDIA Ada GPU architecture whitepaper (2023), appendix A: bfloat16 with float32 sums, dense; PCIe 4.0 x16.
    "rtx-4090": (Hardware("GeForce RTX 4090", 165.2e12, 24 * GIB, 1008e9, 32e9, 1), ["NVIDIA GeForce RTX 4090"]),
    # Google Cloud, "TPU v4": 275 teraflops, 1200 GBps, pods of 4096; Jouppi et al. 2023, table 4: 6 links of 50 GB/s.
    "tpu-v4": (Hardware("TPU v4", 275e12, 32 * GIB, 1200e9, 300e9, 4096), ["TPU v4"]),
    # Google Cloud, "TPU v5e", "TPU v5p", "TPU v6e": half of 400, 1200 and 800 GBps, which are bidirectional, over 4, 6 and 4
    # links; data center network 6.4 Tbps per pod, 50 Gbps per chip and 25.6 Tbps per pod.
    "tpu-v5e": (Hardware("TPU v5e", 197e12, 16 * GIB, 819e9, 200e9, 256, 6.4e12 / 8 / 256), ["TPU v5 lite", "TPU v5e"]),
    "tpu-v5p": (Hardware("TPU v5p", 459e12, 95 * GIB, 2765e9, 600e9, 8960, 50e9 / 8), ["TPU v5", "TPU v5p"]),
    "tpu-v6e": (Hardware("TPU v6e", 918e12, 32 * GIB, 1638e9, 400e9, 256, 25.6e12 / 8 / 256), ["TPU v6 lite", "TPU v6e"]),
    # Google Cloud, "TPU7x (Ironwood)": 2307 TFLOPs, 192 GiB, 7380 GBps, 1200 GBps bidirectional per chip, pods of 9,216. JAX
    # counts each of the chip's two TensorCores as a device, hence half of everything.
    "tpu-7x": (Hardware("TPU7x, one of its two cores", 2307e12 / 2, 96 * GIB, 7380e9 / 2, 300e9, 2 * 9216), ["TPU7x"]),
}
BY_NAME = {name: hardware for name, (hardware, _) in PUBLISHED_FIGURES.items()}
BY_DEVICE_KIND = {
    device_kind: hardware for hardware, device_kinds in PUBLISHED_FIGURES.values() for device_kind in device_kinds
}


def hardware_by_name(name: str) -> Hardware:
    """The published figures for a short name such as "h200" or "tpu-v5p".

    Raises:
      ConfigError: the name is not in the table; the message lists the nearest and all others.
    """
    if name in BY_NAME:
        return BY_NAME[name]
    near = difflib.get_close_matches(name.lower().replace(" ", "-").replace("_", "-"), BY_NAME, 1, 0.5)
    hint = f"; did you mean {near[0]}?" if near else ";"
    raise ConfigError(f"hardware {short_repr(name, 40)} is not in the table{hint} the names are {', '.join(BY_NAME)}")


def find_hardware(device_kind: str) -> Hardware | None:
    """The published figures for a `jax.Device.device_kind`; None for a device that is not in the table, such as a CPU.

    Names must match exactly: a slice of a GPU ("... MIG 1g.10gb") or a slower variant has a longer name.
    """
    return BY_DEVICE_KIND.get(device_kind)
